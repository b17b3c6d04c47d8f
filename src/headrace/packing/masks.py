"""An explicit attention mask, for kernels that take no boundaries. Bool [B, 1, S, S], True where a query must not look.

It grows with the square of the row: 16 MiB at 4096 tokens, 1 GiB at 32768, where boundaries take a few hundred bytes.
So it is made only when asked for, and refused above MAX_MASK_BYTES (NVIDIA/NeMo-Aligner#488: masks filled host memory).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError

MAX_MASK_BYTES = 256 * 2**20


def mask_shape(num_rows: int, seq_length: int) -> tuple[int, int, int, int]:
    """[B, 1, S, S]. Raises ConfigError above MAX_MASK_BYTES."""
    nbytes = num_rows * seq_length * seq_length
    if nbytes > MAX_MASK_BYTES:
        raise ConfigError(
            f"a dense attention mask of {num_rows} x {seq_length} x {seq_length} needs {nbytes:,} bytes in every slot, "
            f"the limit is {MAX_MASK_BYTES:,}; take attention_mask='none' and a kernel that reads cu_seqlens"
        )
    return num_rows, 1, seq_length, seq_length


def write_mask(out: npt.NDArray[np.bool_], cu_seqlens: npt.NDArray[Any]) -> None:
    """Fill `out` [B, 1, S, S]: causal inside each document of `cu_seqlens` (over the joined rows), True elsewhere.

    Every row ends a document. Writes every element.
    """
    seq_length = out.shape[-1]
    out.fill(True)
    later = _later_keys(seq_length)
    for start, end in pairwise(cu_seqlens.tolist()):
        row, first = divmod(start, seq_length)
        inside = slice(first, first + end - start)
        out[row, 0, inside, inside] = later[: end - start, : end - start]


def dense_mask(cu_seqlens: npt.NDArray[np.int32], num_rows: int, seq_length: int) -> npt.NDArray[np.bool_]:
    """The same in a new array, which the caller owns."""
    mask = np.empty(mask_shape(num_rows, seq_length), np.bool_)
    write_mask(mask, cu_seqlens)
    return mask


@lru_cache(maxsize=1)
def _later_keys(seq_length: int) -> npt.NDArray[np.bool_]:
    return np.triu(np.ones((seq_length, seq_length), np.bool_), 1)
