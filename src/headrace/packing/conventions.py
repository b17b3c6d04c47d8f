"""Reading document boundaries as other programs write them down. One list is emitted; all of these are understood:

| written by                      | a row of documents 3 5 in seq_length 8                                   |
|---------------------------------|----------------------------------------------------------------------------|
| headrace, flash attention       | `[0, 3, 8]`, exactly as long as needed                                   |
| Megatron-LM datasets            | `[0, 3, 8, 8, 8, 8, 8, 8, 8]`, filled with seq_length to seq_length + 1 |
| MindSpeed-LLM, actual_seq_len   | `[3, 8]`, `[3, 8, -1, -1, -1, -1, -1, -1]`: no leading 0, filled with -1 |
| Megatron-Bridge, with an argmin | `[0, 3, 8, -1, -1]`, filled with -1                                      |
| Megatron-Bridge, static shapes  | `[0, 3, 8, 8, 8]`, filled with the last boundary                         |

A document of length 0 between two others is none of these, and no kernel has a use for it: it is refused, as is a list
that falls, that does not end with its row, or that has another dtype than int32. Guessing would let documents see each
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError


def read_boundaries(
    written: npt.NDArray[Any] | Sequence[int] | Sequence[Sequence[int]], *, seq_length: int
) -> npt.NDArray[np.int32]:
    """cu_seqlens, int32 [documents + 1] over the joined rows, from any convention above.

    `written` is one list for one row of `seq_length` tokens, or [rows, n], each row counting from its own start as in
    Megatron's datasets. Arrays are int32; lists are host ints. Raises ConfigError naming the entry that is wrong.
    """
    lists = _rows_of(written)
    joined = [np.zeros(1, np.int64)]
    for row, one in enumerate(lists):
        where = f"cu_seqlens of row {row}" if len(lists) > 1 else "cu_seqlens"
        joined.append(_exact(one, seq_length, where)[1:] + row * seq_length)
    return np.concatenate(joined).astype(np.int32)


def check_boundaries(cu_seqlens: npt.NDArray[Any], total: int) -> None:
    """ConfigError, saying what is wrong, unless cu_seqlens is int32, rises from 0 and ends at `total` tokens."""
    if cu_seqlens.dtype != np.int32:
        raise ConfigError(f"cu_seqlens must be int32, as attention kernels take it, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or cu_seqlens.size < 2:
        raise ConfigError(f"cu_seqlens must be [documents + 1] with a document, got shape {list(cu_seqlens.shape)}")
    _check_rising(cu_seqlens, total, "cu_seqlens")


def _rows_of(written: Any) -> list[npt.NDArray[Any]]:
    if isinstance(written, np.ndarray) and written.dtype != np.int32:
        raise ConfigError(
            f"cu_seqlens must be int32, as attention kernels take it, got {written.dtype}; convert it where it is made"
        )
    try:
        nested = written.ndim == 2 if isinstance(written, np.ndarray) else np.ndim(written[0]) == 1
        rows = [np.asarray(row) for row in written] if nested else [np.asarray(written)]
    except (IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"cu_seqlens must be a list of boundaries, got {written!r}") from error
    for row in rows:
        if row.ndim != 1 or row.size == 0 or row.dtype.kind not in "iu":
            raise ConfigError(f"cu_seqlens must be lists of integers with a document each, got {written!r}")
    return rows


def _exact(written: npt.NDArray[Any], seq_length: int, where: str) -> npt.NDArray[Any]:
    """One row's list with its leading 0 and without its filling."""
    negative = np.flatnonzero(written < 0)
    if negative.size:
        if (written[negative[0] :] >= 0).any():
            raise ConfigError(f"{where} has a boundary after a filling of {written[negative[0]]} at {negative[0]}")
        written = written[: negative[0]]
    if not written.size or written[0] != 0:
        written = np.concatenate([[0], written])
    filling = np.flatnonzero(written[::-1] != written[-1])
    written = written[: written.size - filling[0] + 1] if filling.size else written[:1]
    _check_rising(written, seq_length, where)
    return written


def _check_rising(cu_seqlens: npt.NDArray[Any], total: int, where: str) -> None:
    if cu_seqlens[0] != 0:
        raise ConfigError(f"{where} must start at 0, got {cu_seqlens[0]}")
    wrong = np.flatnonzero(np.diff(cu_seqlens) <= 0)
    if wrong.size:
        entry, earlier, later = wrong[0] + 1, cu_seqlens[wrong[0]], cu_seqlens[wrong[0] + 1]
        what = "a document of length 0" if earlier == later else "boundaries that go backwards"
        raise ConfigError(f"{where} has {what}: entry {entry} is {later}, the one before it {earlier}")
    if cu_seqlens[-1] != total:
        raise ConfigError(f"{where} must end with the {total} tokens it divides, got {cu_seqlens[-1]}")
