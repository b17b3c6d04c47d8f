"""From documents in order to the start of each sample: the heart of GPTDataset.

Documents are laid end to end; sample i covers tokens [i * S, i * S + S + extra), so neighbours share the extra token.
Row i of the sample index says where sample i starts: (place in the document order, offset in that document). Row n
closes the last sample. Same rows as build_sample_idx in megatron/core/datasets/helpers.cpp (0.16.1). One pass over the
lengths, in C (native/order.h): they come in order, where Megatron looks each of them up.
"""

from __future__ import annotations

import numpy as np

from headrace import _native
from headrace.order.plan import IntArray


def build_sample_index(lengths_in_order: IntArray, *, sequence_length: int, num_samples: int, extra: int) -> IntArray:
    """The sample index: [num_samples + 1, 2], int32, or int64 where there are more than 2**31 - 1 documents.

    `lengths_in_order`: int32 tokens of each document in reading order, epochs one after another; any stride; at least
    one document is not empty. `extra` is 1 if samples have one token more than `sequence_length`, else 0.
    `num_samples` may reach beyond the last full sample; rows after the last token then all point to the end.
    """
    narrow = len(lengths_in_order) <= np.iinfo(np.int32).max
    index = np.empty((num_samples + 1, 2), np.int32 if narrow else np.int64)
    _native.index_samples(lengths_in_order, index, sequence_length, extra)
    return index
