"""The bytes of a Megatron token store. Everything little-endian; nothing in the .idx file is aligned.

PREFIX.bin   the token ids of all sequences one after another, no header

PREFIX.idx    0        9         17      18              26              34
              | magic  | version | dtype | num_sequences | num_boundaries |
              | 9s     | u64 = 1 | u8    | u64           | u64            |

             34               34 + 4n                  34 + 12n            34 + 12n + 8m
              | lengths i32 [n] | pointers i64 [n], bytes | boundaries i64 [m] | modes i8 [n] or nothing

n is num_sequences, m num_boundaries. A document is a run of sequences: document d holds sequences boundaries[d] to
boundaries[d + 1], so there is one boundary more than there are documents; an empty document repeats a boundary.
`modes` exists in multimodal stores only. Source: megatron/core/datasets/indexed_dataset.py of megatron-core 0.16.1.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, FormatError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1

_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size

LENGTH = np.dtype("<i4")
POINTER = np.dtype("<i8")
BOUNDARY = np.dtype("<i8")
MODE_BYTES = 1

# A sequence cannot be longer than its length field can say.
MAX_SEQUENCE_TOKENS = 2**31 - 1

# Codes 6 and 7 are float64 and float32: legal in the format, but no token ids.
DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
FLOAT_CODES = {6: "float64", 7: "float32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexHeader:
    """The 34 bytes in front of the arrays of an .idx file, and where the arrays lie behind them."""

    dtype: np.dtype[Any]
    num_sequences: int
    num_boundaries: int

    @property
    def lengths_at(self) -> int:
        """Byte offset of the sequence lengths."""
        return HEADER_BYTES

    @property
    def pointers_at(self) -> int:
        """Byte offset of the sequence pointers."""
        return self.lengths_at + LENGTH.itemsize * self.num_sequences

    @property
    def boundaries_at(self) -> int:
        """Byte offset of the document boundaries."""
        return self.pointers_at + POINTER.itemsize * self.num_sequences

    @property
    def nbytes(self) -> int:
        """Size of the .idx file without modes."""
        return self.boundaries_at + BOUNDARY.itemsize * self.num_boundaries

    @property
    def nbytes_multimodal(self) -> int:
        """Size of the .idx file with modes."""
        return self.nbytes + MODE_BYTES * self.num_sequences

    def encode(self) -> bytes:
        """The header's bytes."""
        return _HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[self.dtype], self.num_sequences, self.num_boundaries)


def decode_header(raw: bytes, *, path: str) -> IndexHeader:
    """Read the header of the .idx file at `path`. Raises FormatError that names the field, what it must be and is."""
    if len(raw) < HEADER_BYTES:
        raise FormatError(
            f"{path} is no token store index: it has {len(raw)} bytes, its header alone needs {HEADER_BYTES}"
        )
    magic, version, code, num_sequences, num_boundaries = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise FormatError(f"{path} is no token store index: it starts with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise FormatError(f"{path} has format version {version}, only version {VERSION} can be read")
    if code in FLOAT_CODES:
        raise FormatError(f"{path} has dtype code {code} ({FLOAT_CODES[code]}): token ids must be integers")
    if code not in DTYPE_OF_CODE:
        raise FormatError(f"{path} has unknown dtype code {code}, known are {sorted(DTYPE_OF_CODE)}")
    if num_boundaries < 1:
        raise FormatError(f"{path} has {num_boundaries} document boundaries, at least 1 is needed (the leading 0)")
    return IndexHeader(dtype=DTYPE_OF_CODE[code], num_sequences=num_sequences, num_boundaries=num_boundaries)


def storable(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """`dtype` as it lies on disk. Raises ConfigError where the format has no code for it."""
    wanted = np.dtype(dtype).newbyteorder("<")
    if wanted not in CODE_OF_DTYPE:
        names = ", ".join(sorted(str(known) for known in CODE_OF_DTYPE))
        raise ConfigError(f"a token store cannot hold dtype {np.dtype(dtype)}; choose one of {names}")
    return wanted


def optimal_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """The dtype Megatron's preprocessing chooses: uint16 below 65500 ids, else int32 (also for an unknown vocabulary).

    Trap: Megatron's `--per-dataset-sequences-path` does not read the .idx header and takes uint16 for granted up to
    65536 ids, so it misreads stores of 65500 to 65536 ids. Everything here believes the .idx header alone.
    """
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65500 else np.dtype("<i4")


def tokens_path(prefix: str) -> str:
    """Path of the token file of the store `prefix`."""
    return prefix + ".bin"


def index_path(prefix: str) -> str:
    """Path of the index file of the store `prefix`."""
    return prefix + ".idx"


def prefix_of(path: str | os.PathLike[str]) -> str:
    """The prefix of a store, also if one of its two files was named."""
    prefix = os.fspath(path)
    return prefix[:-4] if prefix.endswith((".bin", ".idx")) else prefix
