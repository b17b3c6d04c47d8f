"""Context parallelism: which tokens of a batch each of `cp_size` ranks takes. Pure functions on index arrays.

| cut        | unit         | rank r of cp_size takes                                                               |
|------------|--------------|----------------------------------------------------------------------------------------|
| documents  | each document, padded to a multiple of 2 * cp_size | chunks r and 2 * cp_size - 1 - r of it            |
| rows       | each row     | chunks r and 2 * cp_size - 1 - r of 2 * cp_size equal ones (zigzag)                    |
| contiguous | each row     | chunk r of cp_size (Ulysses, where heads are exchanged before attention)               |
| hybrid     | each row     | zigzag over cp_size / ulysses_size ranks, then chunk r % ulysses_size of the result    |

A causal mask makes late tokens dearer than early ones; the zigzag gives every rank an early and a late part.
`documents` is TransformerEngine's rule for packed sequences (thd_get_partitioned_indices), `rows` Megatron's
(get_batch_on_this_cp_rank), `hybrid` MindSpeed's. Lengths that cannot be cut evenly raise ConfigError: rounding them
down would drop tokens in silence (NVIDIA/TransformerEngine#1368).
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError

Cut = Literal["documents", "rows", "contiguous", "hybrid"]
Index = npt.NDArray[np.int64]


def row_chunks(
    cut: Cut, length: int, cp_size: int, cp_rank: int, *, ulysses_size: int = 1
) -> tuple[tuple[int, int], ...]:
    """The [start, end) chunks of one row of `length` tokens that a rank takes, in its order; touching ones joined.

    `cut` is one of those that cut rows. Raises ConfigError if the row cannot be cut evenly.
    """
    check_rank(cp_size, cp_rank)
    if cp_size == 1:
        return ((0, length),)
    if cut == "contiguous":
        part = _divide(length, cp_size, "cp_size", cut)
        return ((cp_rank * part, (cp_rank + 1) * part),)
    ring_size = _divide(cp_size, ulysses_size, "ulysses_size", cut) if cut == "hybrid" else cp_size
    ring_rank, within = divmod(cp_rank, cp_size // ring_size)
    chunk = _divide(length, 2 * ring_size, "2 * cp_size" if cut == "rows" else "2 * cp_size / ulysses_size", cut)
    early, late = ring_rank * chunk, (2 * ring_size - 1 - ring_rank) * chunk
    if cut == "hybrid":
        part = _divide(2 * chunk, ulysses_size, "ulysses_size", cut)
        wanted = (within * part, (within + 1) * part)
        halves = (_overlap(early, (0, chunk), wanted), _overlap(late, (chunk, 2 * chunk), wanted))
        return _joined(tuple(half for half in halves if half[0] < half[1]))
    return _joined(((early, early + chunk), (late, late + chunk)))


def row_index(cut: Cut, length: int, cp_size: int, cp_rank: int, *, ulysses_size: int = 1) -> Index:
    """int64 [length / cp_size]: positions in the row of what the rank takes, in its order. See `row_chunks`."""
    chunks = row_chunks(cut, length, cp_size, cp_rank, ulysses_size=ulysses_size)
    return np.concatenate([np.arange(start, end, dtype=np.int64) for start, end in chunks])


def document_index(cu_seqlens_padded: npt.NDArray[np.int32], cp_size: int, cp_rank: int) -> Index:
    """int64 [total / cp_size]: positions in the padded stream of what the rank takes of every document.

    Equal to TransformerEngine's thd_get_partitioned_indices. With cp_size 1, everything. Raises ConfigError unless
    every document is a multiple of 2 * cp_size long: pad it first (`pad_boundaries`).
    """
    check_rank(cp_size, cp_rank)
    lengths = np.diff(cu_seqlens_padded).astype(np.int64)
    if cp_size == 1:
        return np.arange(int(lengths.sum()), dtype=np.int64)
    uneven = np.flatnonzero(lengths % (2 * cp_size))
    if uneven.size:
        raise ConfigError(
            f"document {uneven[0]} has {lengths[uneven[0]]} tokens, no multiple of 2 * cp_size = {2 * cp_size}; "
            "pad documents first (pad_boundaries, or View(cut='documents') which does)"
        )
    chunks = lengths // (2 * cp_size)
    starts = cu_seqlens_padded[:-1].astype(np.int64)
    pairs = np.stack([starts + cp_rank * chunks, starts + (2 * cp_size - 1 - cp_rank) * chunks], 1)
    return concatenated_ranges(pairs.ravel(), np.repeat(chunks, 2))


def pad_boundaries(cu_seqlens: npt.NDArray[np.int32], cp_size: int) -> npt.NDArray[np.int32]:
    """cu_seqlens after every document is padded to a multiple of 2 * cp_size (cp_size 1: unchanged, nothing is cut)."""
    multiple = pad_multiple(cp_size)
    padded = -(-np.diff(cu_seqlens) // multiple) * multiple
    return np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)


def pad_multiple(cp_size: int) -> int:
    """What documents are padded to: 2 * cp_size, or 1 where nothing is cut."""
    return 2 * cp_size if cp_size > 1 else 1


def padded_source(cu_seqlens: npt.NDArray[np.int32], cu_seqlens_padded: npt.NDArray[np.int32]) -> Index:
    """int64 [total padded]: for each position of the padded stream the position in the real one, -1 for padding."""
    source = np.full(int(cu_seqlens_padded[-1]), -1, np.int64)
    lengths = np.diff(cu_seqlens).astype(np.int64)
    source[concatenated_ranges(cu_seqlens_padded[:-1].astype(np.int64), lengths)] = np.arange(lengths.sum())
    return source


def local_boundaries(cu_seqlens_padded: npt.NDArray[np.int32], cp_size: int) -> npt.NDArray[np.int32]:
    """The boundaries inside one rank's part: cu_seqlens_padded / cp_size. TransformerEngine divides by itself (give it
    the global list); MindSpeed's ring attention wants this one, without the leading 0."""
    return (cu_seqlens_padded // cp_size).astype(np.int32)


def concatenated_ranges(starts: Index, lengths: Index) -> Index:
    """int64: start, start + 1, ... for each of the ranges, one after another."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)


def check_rank(cp_size: int, cp_rank: int) -> None:
    """ConfigError unless cp_rank is one of cp_size."""
    if cp_size < 1 or not 0 <= cp_rank < cp_size:
        raise ConfigError(f"cp_rank must lie in [0, cp_size), got {cp_rank} of {cp_size}")


def _divide(length: int, parts: int, name: str, cut: Any) -> int:
    if parts < 1 or length % parts:
        raise ConfigError(
            f"cut {cut!r} needs a length that is a multiple of {name} = {parts}, got {length}; tokens would be lost: "
            "change seq_length, or take cut='documents', which pads"
        )
    return length // parts


def _overlap(offset: int, chunk: tuple[int, int], wanted: tuple[int, int]) -> tuple[int, int]:
    """The part of `chunk` inside `wanted` (both count in what the ring rank holds), as positions of the row."""
    start, end = max(chunk[0], wanted[0]), min(chunk[1], wanted[1])
    return offset + start - chunk[0], offset + end - chunk[0]


def _joined(chunks: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    if len(chunks) == 2 and chunks[0][1] == chunks[1][0]:
        return ((chunks[0][0], chunks[1][1]),)
    return chunks
