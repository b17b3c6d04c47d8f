"""Stand-in: MindSpeed-LLM's names. Its batch path, which is never to be called, and its folding of short documents."""

import torch
from mindspeed.utils import set_actual_seq_len, set_position_ids  # noqa: F401


def get_batch_on_this_tp_rank(data_iterator):
    actual_seq_len = None
    batch = {
        "tokens": None,
        "labels": None,
        "loss_mask": None,
        "attention_mask": None,
        "position_ids": None,
    }
    raise AssertionError("the adapter replaces this function")
    return batch, actual_seq_len


def recompute_valid_actual_seq_len(actual_seq_len, micro_batch_size):
    """Cuts at the first document of one token: [3, 5, 6, 8] becomes [3, 5, 8]."""
    ends = torch.tensor(actual_seq_len)
    short = (ends[1:] - ends[:-1] == 1).nonzero()
    if len(short) < micro_batch_size:
        return ends
    return torch.cat([ends[: int(short[micro_batch_size - 1]) + 1], ends[-1:]])
