"""Where documents end: from the lengths a sample is made of, and between the two ways of writing the list down.

`cu_seqlens` (int32, documents + 1, from 0) is what CUDA attention kernels take, `actual_seq_len` (the same without the
leading 0, a list of Python ints) is what Ascend's take. Both count over the joined rows of a micro batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import index

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError


def actual_seq_len_from_cu_seqlens(cu_seqlens: npt.ArrayLike) -> list[int]:
    """[0, 3, 5, 8] -> [3, 5, 8] as Python ints. ConfigError unless the list starts at 0 and rises."""
    ends = np.asarray(cu_seqlens)
    if ends.ndim != 1 or ends.size < 2 or ends.dtype.kind not in "iu" or ends[0] != 0 or (np.diff(ends) <= 0).any():
        raise ConfigError(
            f"cu_seqlens must be a rising list of integers from 0 with at least one document, got {cu_seqlens!r}"
        )
    tail: list[int] = ends[1:].tolist()
    return tail


def cu_seqlens_from_actual_seq_len(actual_seq_len: Sequence[int]) -> npt.NDArray[np.int32]:
    """[3, 5, 8] -> int32 [0, 3, 5, 8]. ConfigError unless the list rises from above 0."""
    ends = [0, *actual_seq_len]
    if len(ends) < 2 or any(later <= earlier for earlier, later in pairwise(ends)):
        raise ConfigError(
            f"actual_seq_len must be a rising list above 0 with at least one document, got {actual_seq_len}"
        )
    return np.array(ends, np.int32)


def document_ends(
    document_lengths: Sequence[Sequence[int]], *, num_rows: int, seq_length: int, add_extra_token: bool
) -> tuple[npt.NDArray[np.int32], list[int]]:
    """Ends over the joined rows (int32), and how many tokens of each row the lengths account for.

    `document_lengths` has one list per row: the lengths of the parts its text is made of, in tokens, the extra token
    included. As in Megatron-LM's inter_document_masking (GPTDataset.__getitem__): the extra token is taken from the
    last part, which vanishes if it was nothing else; what is missing to `seq_length` is padding and goes to the last
    document. Parts of length 0 are left out: a kernel has no use for an empty segment.

    Raises ConfigError for a wrong number of lists, a negative length, or lengths that are no tokens or too many.
    """
    if len(document_lengths) != num_rows:
        raise ConfigError(
            f"document_lengths needs one list per row: {num_rows} rows, got {len(document_lengths)} lists"
        )
    row_length = seq_length + add_extra_token
    ends: list[int] = []
    accounted: list[int] = []
    for row, lengths in enumerate(document_lengths):
        part_ends = _part_ends(lengths, row=row, row_length=row_length)
        total = part_ends[-1]
        accounted.append(total)
        row_start = row * seq_length
        # The last part ends with the row, whatever it holds; an end at total - 1 is one before a lone extra token.
        ends.extend(row_start + end for end in dict.fromkeys(part_ends) if 0 < end < total - add_extra_token)
        ends.append(row_start + seq_length)
    return np.array(ends, np.int32), accounted


def _part_ends(lengths: Sequence[int], *, row: int, row_length: int) -> list[int]:
    try:
        # index() takes NumPy's integers and refuses 3.5, which an int32 array would cut to 3 in silence.
        part_ends = list(accumulate(map(index, lengths)))
    except TypeError as error:
        raise ConfigError(f"document_lengths of row {row} must be integers: {error}") from None
    if not part_ends or min(lengths) < 0 or not 0 < part_ends[-1] <= row_length:
        raise ConfigError(
            f"document_lengths of row {row} must be >= 0 and sum to between 1 and the {row_length} tokens of the row, "
            f"got {list(lengths)[:8]} with sum {sum(lengths)}"
        )
    return part_ends
