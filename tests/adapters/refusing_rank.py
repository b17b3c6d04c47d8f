"""One rank of TP=2 that is given what cannot be. Prints, per case, what it was told."""

import json
import os

import torch
import torch.distributed as dist

from headrace.adapters.megatron.fields import Rules
from headrace.adapters.megatron.shared import SharedBatches
from headrace.adapters.megatron.stages import Here
from headrace.errors import HeadraceError
from tests.adapters.launching import JOB_TIMEOUT

KEYS = frozenset({"tokens", "labels", "loss_mask", "position_ids"})
RULES = Rules(micro_batch_size=1, seq_length=4, has_fixed_shape=True, shares_positions=False, eod=None, keys=KEYS)


def item(length=4, start=0, **others):
    row = torch.arange(length)[None]
    return {"tokens": row, "labels": row, "loss_mask": row.float(), "position_ids": row + start, **others}


def raising():
    yield item()
    raise OSError("the disk is gone")


def case(name, rank, batches):
    reads = rank == 0
    match name:
        case "no iterator on the reading rank":
            batches.take(None)
        case "an iterator elsewhere":
            batches.take(iter([item()]))
        case "no iterator later":
            batches.take(iter([item()]) if reads else None)
            batches.take(None)
        case "an iterator elsewhere later":
            batches.take(iter([item()]) if reads else None)
            while True:  # a few go on, see headrace.adapters.megatron.objections
                taken = batches.take(iter([item()]))
                assert torch.equal(taken["tokens"], item()["tokens"])
        case "ends early":
            iterator = iter([item(), item()]) if reads else None
            for _ in range(3):
                batches.take(iterator)
        case "the iterator raises":
            iterator = raising() if reads else None
            batches.take(iterator)
            batches.take(iterator)
        case "another shape":
            iterator = iter([item(), item(length=5)]) if reads else None
            batches.take(iterator)
            batches.take(iterator)
        case "labels of another shape":
            batches.take(iter([item(labels=torch.arange(3)[None])]) if reads else None)
        case "another field":
            iterator = iter([item(), item(cu_seqlens=torch.tensor([[0, 4]], dtype=torch.int32))]) if reads else None
            batches.take(iterator)
            batches.take(iterator)
        case "positions that do not count":
            batches.take(iter([item(start=3)]) if reads else None)
        case "no labels":
            batches.take(iter([{"tokens": torch.arange(4)[None]}]) if reads else None)
        case "no dict":
            batches.take(iter([torch.arange(4)]) if reads else None)


CASES = [
    "no iterator on the reading rank",
    "an iterator elsewhere",
    "no iterator later",
    "an iterator elsewhere later",
    "ends early",
    "the iterator raises",
    "another shape",
    "labels of another shape",
    "another field",
    "positions that do not count",
    "no labels",
    "no dict",
]


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", f"file://{os.environ['MEETING']}", rank=rank, world_size=2, timeout=JOB_TIMEOUT)
    where = Here(
        ranks=(0, 1), tp_rank=rank, dp_rank=0, dp_size=1, pp_size=1, stage="only", schedule="1f1b",
        device=torch.device("cpu"), in_flight=1,
    )  # fmt: skip
    told = {}
    for name in CASES:
        batches = SharedBatches(where, RULES)
        try:
            case(name, rank, batches)
            told[name] = "nothing"
        except HeadraceError as error:
            told[name] = f"{type(error).__name__}: {error}"
        if batches._feed is not None:
            batches._feed.close()
        del batches
        dist.barrier()
    print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
