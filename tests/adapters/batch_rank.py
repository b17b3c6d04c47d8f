"""One rank of TP=2 x PP=2: what the adapter hands each stage, for each place of the batch path and for the feeder.

An assertion that fails ends the rank with its traceback. Every rank knows what the reading rank reads.
"""

import os

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import rerun_state_machine
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.training import get_args, get_tokenizer, parse_args, training, utils
from mindspeed.utils import HEARD

from headrace.adapters.megatron import boundaries, feeder, install
from headrace.adapters.megatron.batch_path import BatchPath
from headrace.adapters.megatron.places import find_place
from tests.adapters.launching import JOB_TIMEOUT

ROWS, LENGTH, EOD = 2, 16, 0
FIRST, LAST = ["tokens", "position_ids"], ["labels", "loss_mask"]


def main():
    install()
    torch.set_num_threads(1)
    args = parse_args()
    dist.init_process_group(
        "gloo",
        f"file://{os.environ['MEETING']}",
        rank=int(os.environ["RANK"]),
        world_size=4,
        timeout=JOB_TIMEOUT,
    )
    mpu.initialize_model_parallel(2, 2)
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    check_iterator_place()
    check_batch_place()
    check_mindspeed()
    check_feeder(args)
    dist.barrier()
    dist.destroy_process_group()


def micro_batch(number):
    """Rows of documents, some of one token, and where the documents end."""
    random = np.random.default_rng(number)
    tokens = random.integers(1, 64, (ROWS, LENGTH))
    tokens[random.random((ROWS, LENGTH)) < 0.3] = EOD
    positions, ends = np.empty_like(tokens), []
    for row in range(ROWS):
        start = 0
        for at in range(LENGTH):
            positions[row, at] = at - start
            if tokens[row, at] == EOD or at == LENGTH - 1:
                start = at + 1
                ends.append(row * LENGTH + start)
    item = {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(random.integers(0, 64, (ROWS, LENGTH))),
        "loss_mask": torch.from_numpy(random.random((ROWS, LENGTH)).astype(np.float32)),
        "position_ids": torch.from_numpy(positions),
    }
    return item, ends


def reader(first, count=20):
    """On the reading rank of each group, as Megatron has it."""
    if mpu.get_tensor_model_parallel_rank() > 0:
        return None
    return rerun_state_machine.RerunDataIterator(micro_batch(number)[0] for number in range(first, first + count))


def here():
    return FIRST if mpu.is_pipeline_first_stage() else LAST


def assert_is(batch, number, wanted=None):
    item, ends = micro_batch(number)
    wanted = wanted or here()
    assert sorted(key for key, value in batch.items() if value is not None) == sorted(wanted)
    for name in wanted:
        assert torch.equal(batch[name], item[name]), (name, number)
    assert boundaries().actual_seq_len == tuple(ends)
    assert boundaries().cu_seqlens.tolist() == [0, *ends]
    assert boundaries().max_seqlen == max(np.diff([0, *ends]))


def check_iterator_place():
    """Up to 0.17. Training and validation take turns; what Megatron rewinds comes again; batches in flight stay."""
    assert utils.get_batch_on_this_tp_rank.__module__.startswith("megatron.training")
    train, valid = reader(0), reader(100)
    kept = [utils.get_batch_on_this_tp_rank(train) for _ in range(3)]
    assert list(kept[0])[:5] == ["tokens", "labels", "loss_mask", "attention_mask", "position_ids"]
    assert_is(kept[2], 2)
    assert_is(utils.get_batch_on_this_tp_rank(valid), 100)
    if train is not None:
        train.rewind()
    again = [utils.get_batch_on_this_tp_rank(train) for _ in range(3)]
    for before, after in zip(kept, again, strict=True):
        assert all(before[name] is None or torch.equal(before[name], after[name]) for name in before)
    if train is not None:
        train.advance()
    assert_is(utils.get_batch_on_this_tp_rank(train), 3)
    if mpu.is_pipeline_last_stage():
        whole = utils.get_batch_on_this_tp_rank(train, mtp_on_this_rank=True)
        # The ring holds what the rank's own stage needs unless --mtp-num-layers says that a stage predicts.
        assert whole["labels"] is not None
    else:
        utils.get_batch_on_this_tp_rank(train)
    assert_is(utils.get_batch_on_this_tp_rank(valid), 101)


def check_batch_place():
    """From 0.18, in a loop that does not use Megatron's schedules: only the reading rank has a batch to pass."""
    del utils.get_batch_on_this_tp_rank
    from megatron.training import pure

    BatchPath(find_place()).put_in_place()
    train = reader(200)
    for number in (200, 201, 202):
        batch = pure.get_batch_on_this_tp_rank(
            next(train) if train is not None else {},
            is_sft=False,
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=False,
            broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
            broadcast_group=mpu.get_tensor_model_parallel_group(),
            cp_size=1,
            tp_rank=mpu.get_tensor_model_parallel_rank(),
            micro_batch_size=ROWS,
            seq_length=LENGTH,
            mtp_on_this_rank=False,
            pipeline_model_parallel_size=2,
            is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
            is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
        )
        assert len(batch) == 10
        assert_is(batch, number)


def check_mindspeed():
    """Every stage has global positions, attention is told the exact ends, and nothing folds short documents."""
    from mindspeed_llm.training import utils as theirs

    utils.get_batch_on_this_tp_rank = theirs.get_batch_on_this_tp_rank
    place = find_place()
    assert place.is_mindspeed
    assert place.returns_pair
    BatchPath(place).put_in_place()
    train = reader(300)
    wanted = [name for name in ("tokens", *LAST, "position_ids") if name in here() or name == "position_ids"]
    for number in (300, 301):
        batch, actual_seq_len = utils.get_batch_on_this_tp_rank(train)
        assert_is(batch, number, wanted)
        ends = micro_batch(number)[1]
        assert actual_seq_len == HEARD["actual_seq_len"] == ends
        assert torch.equal(HEARD["position_ids"], batch["position_ids"].T)
        assert 1 in np.diff(ends), "a document of one token, or this shows nothing"
        assert theirs.recompute_valid_actual_seq_len(ends, ROWS).tolist() == ends


def check_feeder(args):
    """--headrace-feeder: on every rank what GPTDataset holds, from consumed_train_samples on."""
    feeder.build_here()
    args.consumed_train_samples = 2 * args.global_batch_size
    train, valid, test = training.build_train_valid_test_data_iterators(None)
    assert (args.do_train, args.do_valid, args.do_test) == (True, True, True)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=LENGTH,
        blend=get_blend_from_list(args.data_path),
        split=args.split,
        path_to_cache=os.environ["CACHE"],
        tokenizer=get_tokenizer(),
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        create_attention_mask=False,
    )
    sizes = training.get_train_valid_test_num_samples()
    datasets = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    for iterator, dataset, skipped in ((train, datasets[0], 2 * args.global_batch_size), (valid, datasets[1], 0)):
        for start in range(skipped, skipped + 3 * ROWS, ROWS):
            batch, _ = utils.get_batch_on_this_tp_rank(iterator)
            samples = [dataset[index] for index in range(start, start + ROWS)]
            for name in here():
                assert torch.equal(batch[name], torch.stack([sample[name] for sample in samples])), (name, start)
    for iterator in (train, valid, test):
        iterator.iterable.close()
    assert get_args() is args


if __name__ == "__main__":
    main()
