"""Multi-token prediction: the fields of depth k, which predicts k tokens further ahead than the model itself.

Two rules. Kept boundaries (Megatron-LM's `roll_tensor`): each document moves left by one token per depth inside its own
boundaries, its last positions become 0, nothing crosses from one document into another.

    tokens, documents 3 2 1 2      5 6 9 | 7 9 | 9 | 8 4
    depth 1                        6 9 0 | 9 0 | 0 | 4 0
    depth 2                        9 0 0 | 0 0 | 0 | 0 0

Moved boundaries (MindSpeed-LLM): the whole row moves, and the boundaries inside it move along:

    depth 1                        6 9 | 7 9 | 9 | 8 4 0

There a document shorter than the depth would get an empty or negative segment; here it gets none.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError

BoundaryRule = Literal["kept", "moved"]


def moved_left(
    field: npt.NDArray[Any], depth: int, *, cu_seqlens: npt.NDArray[np.int32] | None = None, fill: int = 0
) -> npt.NDArray[Any]:
    """`field` [rows, S] of depth 0 at `depth`, in a new array: position i holds what depth 0 holds at i + depth.

    Past the end of its document (`cu_seqlens` over the joined rows; None: of its row) it holds `fill`.
    """
    check_depth(depth)
    flat = field.reshape(-1)
    ends = _end_of_each_position(field.shape, cu_seqlens)
    source = np.arange(flat.size) + depth
    held = source < ends
    moved = np.full_like(flat, fill)
    moved[held] = flat[source[held]]
    return moved.reshape(field.shape)


def moved_boundaries(cu_seqlens: npt.NDArray[np.int32], depth: int, *, seq_length: int) -> npt.NDArray[np.int32]:
    """Boundaries at `depth` when they move with the tokens: int32, rising, over the joined rows of `seq_length`.

    Row ends stay. A boundary that would pass the start of its row is clamped there, and the empty segment it leaves is
    dropped: MindSpeed-LLM's compute_actual_seq_len lets it become negative or run backwards.
    """
    check_depth(depth)
    ends = cu_seqlens[1:].astype(np.int64)
    row_starts = (ends - 1) // seq_length * seq_length
    moved = np.where(ends % seq_length == 0, ends, np.maximum(ends - depth, row_starts))
    return np.unique(np.concatenate([[0], moved])).astype(np.int32)


def positions_after_moving(
    position_ids: npt.NDArray[np.int64], depth: int, *, cu_seqlens: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """Positions [rows, S] at `depth` under moved boundaries: they count from the start of each moved segment; the last
    `depth` of a row, which hold no token, are 0. Never read boundaries off them: those zeros are none."""
    rows, seq_length = position_ids.shape
    starts = moved_boundaries(cu_seqlens, depth, seq_length=seq_length)
    positions = np.arange(rows * seq_length) - np.repeat(starts[:-1].astype(np.int64), np.diff(starts))
    moved: npt.NDArray[np.int64] = positions.reshape(rows, seq_length)
    moved[:, max(seq_length - depth, 0) :] = 0
    return moved


def check_depth(depth: int) -> None:
    if depth < 0:
        raise ConfigError(f"a prediction depth is at least 0, got {depth}")


def _end_of_each_position(shape: tuple[int, ...], cu_seqlens: npt.NDArray[np.int32] | None) -> npt.NDArray[np.int64]:
    if cu_seqlens is None:
        return np.repeat(np.arange(1, shape[0] + 1) * shape[1], shape[1])
    return np.repeat(cu_seqlens[1:].astype(np.int64), np.diff(cu_seqlens))
