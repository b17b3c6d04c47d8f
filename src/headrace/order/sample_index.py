"""From documents in order to the start of each sample: the heart of GPTDataset, in NumPy.

Documents are laid end to end; sample i covers tokens [i * S, i * S + S + extra), so neighbours share the extra token.
Row i of the sample index says where sample i starts: (place in the document order, offset in that document). Row n
closes the last sample. Same rows as build_sample_idx in megatron/core/datasets/helpers.cpp (0.16.1), which walks the
documents one by one. Here they are taken in blocks: running total, division by S, and where the quotient jumps a
sample starts.
"""

from __future__ import annotations

import numpy as np

from headrace.order.plan import IntArray

# Documents per block. 256 KiB per int32 array, so that all of a block's arrays stay in a 2 MiB L2 cache.
_BLOCK = 1 << 16


def build_sample_index(lengths_in_order: IntArray, *, sequence_length: int, num_samples: int, extra: int) -> IntArray:
    """The sample index: [num_samples + 1, 2], int32, or int64 where there are more than 2**31 - 1 documents.

    `lengths_in_order`: int32 tokens of each document in reading order, epochs one after another; any stride; at least
    one document is not empty. `extra` is 1 if samples have one token more than `sequence_length`, else 0.
    `num_samples` may reach beyond the last full sample; rows after the last token then all point to the end.
    """
    num_documents = len(lengths_in_order)
    index = np.empty((num_samples + 1, 2), np.int32 if num_documents <= np.iinfo(np.int32).max else np.int64)
    # Row r is settled by the document that holds token r * S + extra - 1. `behind` counts the tokens since the one
    # that settled row - 1. With an extra token row 0 waits for the very first token, without one it needs none.
    row = 1 - extra
    behind = extra * (sequence_length - 1)
    for first in range(0, num_documents, _BLOCK):
        if row > num_samples:
            break
        places, offsets, behind = _settle(lengths_in_order[first : first + _BLOCK], behind, sequence_length)
        count = min(len(places), num_samples + 1 - row)
        np.add(places[:count], first, out=index[row : row + count, 0], casting="unsafe")
        np.subtract(offsets[:count], extra, out=index[row : row + count, 1], casting="unsafe")
        row += count
    if row <= num_samples:
        index[row:] = _end(lengths_in_order, extra)
    # Sample 0 starts at the very beginning, also if the first documents are empty.
    index[0] = 0
    return index


def _settle(lengths: IntArray, behind: int, step: int) -> tuple[IntArray, IntArray, int]:
    """The rows that one block settles: their documents, how many tokens of those they pass, and the new `behind`."""
    ends = np.cumsum(lengths, dtype=lengths.dtype)
    ends += lengths.dtype.type(behind)
    if int(ends.min()) < 0:
        # 32 bits did not do: as each length is below 2**31, the first total that is too large shows as negative.
        # They nearly always do, and halve the time.
        return _settle(lengths.astype(np.int64), behind, step)
    passed = np.zeros(len(ends) + 1, ends.dtype)
    np.floor_divide(ends, step, out=passed[1:])
    num_settled = int(passed[-1])
    behind = int(ends[-1]) - num_settled * step
    places = np.flatnonzero(passed[1:] != passed[:-1])
    if len(places) != num_settled:
        # A document longer than a sample settles several rows.
        places = np.repeat(places, passed[1:].take(places) - passed.take(places))
    ends -= lengths
    offsets = np.arange(1, num_settled + 1, dtype=ends.dtype)
    offsets *= step
    offsets -= ends.take(places)
    return places, offsets, behind


def _end(lengths_in_order: IntArray, extra: int) -> tuple[int, int]:
    """Where the tokens end: in the last document that has any, before the token the next sample would share."""
    last = int(np.flatnonzero(lengths_in_order)[-1])
    return last, int(lengths_in_order[last]) - extra
