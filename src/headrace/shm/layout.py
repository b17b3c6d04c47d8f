"""Where things lie in a slot. The picture and every number are native/layout.h's; this file is its Python reading.

    | descriptor | field 0 | ... | field F-1 | field data, each aligned to 128 | blob | (free) |

A field table is written once per slot and layout. Versions that share it differ only in the descriptor: their number,
their counts, and the first dimension of their ragged fields.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

from headrace import _native
from headrace.errors import ConfigError, FormatError
from headrace.spec import FIELD_ALIGNMENT, MAX_DIMENSIONS, BatchSpec, Field, align

# version, kind, layout_id, used_bytes, blob_offset, blob_bytes, num_fields, num_ragged
DESCRIPTOR_HEAD = struct.Struct("<QIIQQQII")
# name, dtype, offset, shape[6], num_dimensions, ragged_index
FIELD = struct.Struct("<40s16sQ6qIi8x")
assert FIELD.size == _native.FIELD_BYTES, "native/layout.h and shm/layout.py disagree"

_DTYPE_BYTES = 16

SLOT_ALIGNMENT = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one field of a slot lies: `offset` bytes from the start of the slot, at its full capacity `shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    ragged_index: int = -1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotLayout:
    """A whole slot: the places of its fields (aliases included, at the place of what they name) and of its blob."""

    places: tuple[Place, ...]
    fields_offset: int
    blob_offset: int
    num_ragged: int


def lay_out(spec: BatchSpec) -> SlotLayout:
    """Give every field of `spec` its place."""
    num_places = len(spec.fields) + len(spec.aliases)
    fields_offset = offset = _native.DESCRIPTOR_BYTES + num_places * _native.FIELD_BYTES
    places: dict[str, Place] = {}
    num_ragged = 0
    for field in spec.fields:
        places[field.name] = _place(field, offset, num_ragged if field.ragged else -1)
        num_ragged += field.ragged
        offset += align(field.nbytes, FIELD_ALIGNMENT)
    for alias, name in spec.aliases:
        of = places[name]
        places[alias] = Place(
            name=alias, dtype=of.dtype, shape=of.shape, offset=of.offset, ragged_index=of.ragged_index
        )
    if num_ragged > _native.MAX_RAGGED:
        raise ConfigError(f"at most {_native.MAX_RAGGED} fields of a batch can be ragged, got {num_ragged}")
    return SlotLayout(
        places=tuple(places.values()), fields_offset=fields_offset, blob_offset=offset, num_ragged=num_ragged
    )


def _place(field: Field, offset: int, ragged_index: int) -> Place:
    dtype = np.dtype(field.dtype).newbyteorder("<").str
    if np.dtype(dtype).newbyteorder("=") != np.dtype(field.dtype).newbyteorder("=") or len(dtype) > _DTYPE_BYTES:
        raise ConfigError(
            f"field {field.name!r} has dtype {np.dtype(field.dtype)}, which the type string {dtype!r} does not say; "
            "split a structured field into plain ones, view bfloat16 as uint16"
        )
    return Place(name=field.name, dtype=dtype, shape=field.shape, offset=offset, ragged_index=ragged_index)


def slot_bytes_for(spec: BatchSpec, *, blob_bytes: int) -> int:
    """The size of a slot that holds `spec` at full capacity and a blob of `blob_bytes`."""
    return align(lay_out(spec).blob_offset + blob_bytes, SLOT_ALIGNMENT)


def write_table(slot: np.ndarray, layout: SlotLayout) -> None:
    """Write the field table into `slot` (uint8 [slot_bytes])."""
    for i, place in enumerate(layout.places):
        shape = place.shape + (0,) * (MAX_DIMENSIONS - len(place.shape))
        FIELD.pack_into(
            slot.data,
            _native.DESCRIPTOR_BYTES + i * _native.FIELD_BYTES,
            place.name.encode(),
            place.dtype.encode(),
            place.offset,
            *shape,
            len(place.shape),
            place.ragged_index,
        )


def read_table(slot: np.ndarray) -> tuple[Place, ...]:
    """Read the field table of `slot` (uint8 [slot_bytes]); FormatError if it points outside the slot."""
    num_fields = DESCRIPTOR_HEAD.unpack_from(slot.data)[6]
    if _native.DESCRIPTOR_BYTES + num_fields * _native.FIELD_BYTES > len(slot):
        raise FormatError(f"a slot of {len(slot):,} bytes cannot hold a table of {num_fields} fields")
    places = []
    for i in range(num_fields):
        name, dtype, offset, *shape, num_dimensions, ragged_index = FIELD.unpack_from(
            slot.data, _native.DESCRIPTOR_BYTES + i * _native.FIELD_BYTES
        )
        place = Place(
            name=name.rstrip(b"\0").decode(),
            dtype=dtype.rstrip(b"\0").decode(),
            shape=tuple(shape[:num_dimensions]),
            offset=offset,
            ragged_index=ragged_index,
        )
        if place.offset + place.nbytes > len(slot):
            raise FormatError(f"field {place.name!r} ends outside its slot of {len(slot):,} bytes")
        places.append(place)
    return tuple(places)


def read_blob(slot: np.ndarray) -> bytes:
    """A copy of the slot's extra metadata."""
    *_, blob_offset, blob_bytes, _num_fields, _num_ragged = DESCRIPTOR_HEAD.unpack_from(slot.data)
    if blob_offset + blob_bytes > len(slot):
        raise FormatError(f"the metadata of a slot ends outside its {len(slot):,} bytes")
    return slot[blob_offset : blob_offset + blob_bytes].tobytes()


def view(slot: np.ndarray, place: Place) -> np.ndarray:
    """The array of a field at full capacity: shares memory with `slot`, which keeps the mapping alive."""
    return slot[place.offset : place.offset + place.nbytes].view(place.dtype).reshape(place.shape)
