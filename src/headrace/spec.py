"""What a batch is made of: names, dtypes, shapes, alignment. Pure description; nothing here allocates.

Names are Megatron's (`tokens`, `labels`, `loss_mask`, `position_ids`, `cu_seqlens`); a layout may rename them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headrace.errors import ConfigError

# A field never starts at an odd offset: `rep movsb` is 20x slower on Zen 3 when source and destination differ by
# 1 or 16 modulo 4096; multiples of 32 are safe, and 128 also keeps two fields off one pair of cache lines.
FIELD_ALIGNMENT = 128
# Device pinning on Ascend wants 64 KiB granularity, and aarch64 kernels may have 64 KiB pages.
ARENA_ALIGNMENT = 64 * 1024

MAX_FIELDS = 32
MAX_DIMENSIONS = 6
MAX_NAME_BYTES = 40


def align(nbytes: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `nbytes`."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One array of a batch.

    `shape` is its capacity. A `ragged` field may be shorter in its first dimension from batch to batch (`cu_seqlens`
    has one entry more than there are documents); every other field always fills its shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ragged: bool = False

    def __post_init__(self) -> None:
        # Lone surrogates are no text, and a name ends at its first NUL where it lies in a slot.
        if not 1 <= len(self.name.encode(errors="replace")) <= MAX_NAME_BYTES:
            raise ConfigError(f"a field name has 1 to {MAX_NAME_BYTES} bytes, got {self.name!r}")
        if "\0" in self.name or any("\ud800" <= letter <= "\udfff" for letter in self.name):
            raise ConfigError(f"a field name is text without NUL characters, got {self.name!r}")
        if np.dtype(self.dtype).hasobject:
            raise ConfigError(f"field {self.name!r} has dtype {self.dtype}: objects cannot live in shared memory")
        if len(self.shape) > MAX_DIMENSIONS:
            raise ConfigError(f"field {self.name!r} has {len(self.shape)} dimensions, at most {MAX_DIMENSIONS} fit")
        if self.ragged and not self.shape:
            raise ConfigError(f"field {self.name!r} is a scalar and cannot be ragged")

    @property
    def nbytes(self) -> int:
        """Bytes at full capacity."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """The fields of a batch in the order in which they lie in a slot. `aliases` gives a field a second name."""

    fields: tuple[Field, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields] + [alias for alias, _ in self.aliases]
        if len(set(names)) != len(names):
            raise ConfigError(f"field names must differ, got {names}")
        if not 1 <= len(self.fields) <= MAX_FIELDS:
            raise ConfigError(f"a batch has 1 to {MAX_FIELDS} fields, got {len(self.fields)}")

    @property
    def nbytes(self) -> int:
        """Bytes of all fields at full capacity, each aligned to FIELD_ALIGNMENT."""
        return sum(align(field.nbytes, FIELD_ALIGNMENT) for field in self.fields)
