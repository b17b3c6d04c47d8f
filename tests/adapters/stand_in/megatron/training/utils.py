"""Stand-in: the batch path as core_v0.16.1 has it, which asks the iterator and broadcasts field by field."""

import torch
from megatron.core import parallel_state as mpu
from megatron.training import PLACE, get_args


def _baseline(data_iterator, mtp_on_this_rank=False):
    """The group's first rank reads; every field is one broadcast; the others allocate from the arguments."""
    args = get_args()
    assert not getattr(args, "enable_share_memory", False), "the adapter replaces this function"
    source, group = mpu.get_tensor_model_parallel_src_rank(), mpu.get_tensor_model_parallel_group()
    reads = mpu.get_tensor_model_parallel_rank() == 0
    shape = (args.micro_batch_size, args.seq_length)
    data = next(data_iterator) if reads else {}

    def shared(name, dtype, shape):
        field = data[name] if reads else torch.empty(shape, dtype=dtype)
        torch.distributed.broadcast(field, source, group=group)
        return field

    whole = args.pipeline_model_parallel_size == 1 or mtp_on_this_rank
    first, last = whole or mpu.is_pipeline_first_stage(), whole or mpu.is_pipeline_last_stage()
    tokens = shared("tokens", torch.int64, shape) if first else None
    labels = shared("labels", torch.int64, shape) if last else None
    loss_mask = shared("loss_mask", torch.float32, shape) if last else None
    attention_mask = None
    if args.create_attention_mask_in_dataloader:
        attention_mask = shared("attention_mask", torch.bool, (shape[0], 1, shape[1], shape[1]))
    position_ids = shared("position_ids", torch.int64, shape) if first else None
    batch = {  # the name by which the adapter finds the keys
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "cu_seqlens": None,
        "max_seqlen": None,
        "local_cp_size": None,
    }
    return batch  # noqa: RET504


if PLACE == "training":
    get_batch_on_this_tp_rank = _baseline
    get_batch_on_this_tp_rank.__name__ = "get_batch_on_this_tp_rank"
elif PLACE == "mindspeed":
    from mindspeed_llm.training.utils import get_batch_on_this_tp_rank
