"""A training script as Megatron users have one: GPTDataset, GPTModel, Megatron's schedules, TP over gloo, on a CPU.

Run it with plain python, or through `python -m headrace.adapters.megatron`. One line per step on rank 0: the loss, bit
by bit. `--save FOLDER` keeps a checkpoint every second step and continues from the newest one; `CLIENT_DIES_AT=n` kills
the second rank by SIGKILL in step n.
"""

import os
import signal
import struct
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import rerun_state_machine, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.training import PLACE, get_args, get_tokenizer, parse_args
from megatron.training.training import build_train_valid_test_data_iterators

from tests.adapters import cpu_shim
from tests.adapters.launching import JOB_TIMEOUT

if PLACE == "core":
    from megatron.training.pure import get_batch_on_this_tp_rank
else:
    from megatron.training.utils import get_batch_on_this_tp_rank

KEYS = [
    "attention_mask", "cu_seqlens", "cu_seqlens_padded", "hybrid_cp_group", "labels", "local_cp_size", "loss_mask",
    "max_seqlen", "position_ids", "tokens",
]  # fmt: skip


def main():
    cpu_shim.install()
    args = parse_args()
    torch.set_num_threads(1)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", f"file://{os.environ['MEETING']}", rank=rank, world_size=num_ranks, timeout=JOB_TIMEOUT
    )
    mpu.initialize_model_parallel(args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    torch.manual_seed(args.seed)
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.DISABLED)
    model = build_model(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load(args, model)
    train, valid, _ = build_train_valid_test_data_iterators(provide_iterators)
    step = partial(get_forward_backward_func(), forward_step_func=forward_step, model=model, seq_length=args.seq_length,
                   micro_batch_size=args.micro_batch_size)  # fmt: skip
    num_microbatches = args.global_batch_size // args.micro_batch_size
    for iteration in range(args.iteration, args.train_iters):
        if rank == 1 and os.environ.get("CLIENT_DIES_AT") == str(iteration):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        losses = step(data_iterator=train, num_microbatches=num_microbatches, forward_only=False)
        optimizer.step()
        args.consumed_train_samples += args.global_batch_size
        report("train", iteration, losses)
        if (iteration + 1) % args.eval_interval == 0:
            with torch.no_grad():
                losses = step(data_iterator=valid, num_microbatches=args.eval_iters, forward_only=True)
            args.consumed_valid_samples += args.eval_iters * args.micro_batch_size
            report("valid", iteration, losses)
        if args.save and (iteration + 1) % 2 == 0:
            save(args, model, iteration + 1)
    dist.barrier()
    dist.destroy_process_group()


def build_model(args):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=args.vocab_size,
        max_sequence_length=args.seq_length,
        position_embedding_type="learned_absolute",
    )


def provide_iterators(num_samples):
    """As pretrain_gpt.py: datasets on the first rank of a tensor-parallel group alone."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(args.data_path, None),
        split=args.split,
        path_to_cache=os.environ["CACHE"],
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    datasets = BlendedMegatronDatasetBuilder(GPTDataset, num_samples, is_built_here, config).build()
    consumed = (args.consumed_train_samples, args.consumed_valid_samples, 0)
    return tuple(map(loader, datasets, consumed))


def is_built_here():
    return mpu.get_tensor_model_parallel_rank() == 0


def loader(dataset, consumed):
    args = get_args()
    if dataset is None:
        return None
    size = args.micro_batch_size
    batches = [range(start, start + size) for start in range(consumed, len(dataset) - size + 1, size)]
    return rerun_state_machine.RerunDataIterator(iter(torch.utils.data.DataLoader(dataset, batch_sampler=batches)))


def get_batch(data_iterator):
    """As pretrain_gpt.py of core_v0.16.1, which unpacks values, or of core_v0.18.0, where it asks the iterator."""
    if PLACE != "core":
        tokens, labels, loss_mask, attention_mask, position_ids, *_ = get_batch_on_this_tp_rank(data_iterator).values()
        return tokens, labels, loss_mask, attention_mask, position_ids
    args, batch = get_args(), {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = next(data_iterator)
        for key in KEYS:
            batch[key] = batch[key].cuda(non_blocking=True) if batch.get(key) is not None else None
    batch = get_batch_on_this_tp_rank(
        batch,
        is_sft=args.sft,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=1,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    assert sorted(batch) == KEYS
    return (batch[key] for key in ("tokens", "labels", "loss_mask", "attention_mask", "position_ids"))


def forward_step(data_iterator, model):
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator)
    output = model(tokens, position_ids, attention_mask, labels=labels)
    return output, partial(loss_of, loss_mask)


def loss_of(loss_mask, output):
    loss = (output.float() * loss_mask).sum() / loss_mask.sum().clamp(min=1)
    return loss, {"loss": loss.detach().clone()}


def report(what, iteration, losses):
    if dist.get_rank() == 0:
        exact = " ".join(struct.pack("f", one["loss"].item()).hex() for one in losses)
        print(f"{what} {iteration} {exact}", flush=True)


def save(args, model, iteration):
    state = {
        "model": {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)},
        "iteration": iteration,
        "consumed_train_samples": args.consumed_train_samples,
        "consumed_valid_samples": args.consumed_valid_samples,
    }
    path = Path(args.save) / f"rank{dist.get_rank()}.pt"
    torch.save(state, path.with_suffix(".draft"))
    dist.barrier()  # both have written, or neither moves on
    path.with_suffix(".draft").rename(path)
    dist.barrier()


def load(args, model):
    path = Path(args.save or "") / f"rank{dist.get_rank()}.pt"
    if args.save and path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state.pop("model"), strict=False)
        for name, value in state.items():
            setattr(args, name, value)


if __name__ == "__main__":
    main()
