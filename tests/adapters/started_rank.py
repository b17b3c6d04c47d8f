"""The beginning of a Megatron script: it parses its arguments, and then the job starts."""

import os
import sys
from types import ModuleType

import torch.distributed as dist

from headrace.adapters.megatron import install
from tests.adapters.launching import JOB_TIMEOUT

# What would take seconds to import: of megatron.core only the version is asked, of the batch path its shape.
core, utils = ModuleType("megatron.core"), ModuleType("megatron.training.utils")
core.__version__ = "0.16.1"
sys.modules["megatron.core"], sys.modules["megatron.training.utils"] = core, utils


def get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=False):
    batch = {"tokens": None, "labels": None, "loss_mask": None, "attention_mask": None, "position_ids": None}
    return batch  # noqa: RET504


utils.get_batch_on_this_tp_rank = get_batch_on_this_tp_rank
ORIGINAL = [get_batch_on_this_tp_rank]  # every module's name for it is replaced, this one's too

if __name__ == "__main__":
    install()
    install()
    from megatron.training import parse_args

    parse_args()
    dist.init_process_group(
        "gloo",
        f"file://{os.environ['MEETING']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=JOB_TIMEOUT,
    )
    is_original = [name is ORIGINAL[0] for name in (get_batch_on_this_tp_rank, utils.get_batch_on_this_tp_rank)]
    print("started", is_original)
