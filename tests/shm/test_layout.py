"""The bytes of layout version 1. If one of these tests fails, HR_LAYOUT_VERSION must change with it."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import _native
from headrace.errors import ConfigError, FormatError
from headrace.shm import layout
from headrace.spec import FIELD_ALIGNMENT, BatchSpec, Field

GENERATION, STARTED = 0x1122334455667788, 0x0102030405060708


def a_control(num_readers: int = 2) -> tuple[np.ndarray, _native.RingWriter]:
    control = np.zeros(_native.CONTROL_BYTES + num_readers * _native.LINE_BYTES, np.uint8)
    return control, _native.RingWriter(control, 3, num_readers, 1, GENERATION, 4711, STARTED)


def test_the_control_bytes_are_frozen_for_version_1() -> None:
    control, _writer = a_control()
    raw = control.tobytes()
    assert raw[:48].hex(" ") == (
        "48 45 41 44 52 41 43 45 "  # HEADRACE
        "01 00 00 00 03 00 00 00 02 00 00 00 01 00 00 00 "  # version 1, 3 slots, 2 readers, hold 1
        "88 77 66 55 44 33 22 11 67 12 00 00 00 00 00 00 08 07 06 05 04 03 02 01"  # generation, writer's pid and start
    )
    assert raw[128:132] == bytes(4), "running"
    assert raw[256:264] == bytes(8), "nothing is published"
    assert raw[384:400].hex() == "0" * 16 + "f" * 16, "the writer waits for nothing"
    assert raw[512:] == bytes(256), "two unclaimed readers"
    assert len(raw) == 6 * 128


def test_a_reader_claims_its_line_and_its_release_shows_there() -> None:
    control, writer = a_control()
    data = np.zeros(3 * 4096, np.uint8)
    writer.use_data(data, 4096)
    reader = _native.RingReader(control, 1, 815, STARTED)
    reader.use_data(data, 4096)
    line = control[512 + 128 : 512 + 256]
    assert struct.unpack("<QI4xqQ", line.tobytes()[:32]) == (0, 1, 815, STARTED)
    assert writer.begin(0.0) == 0
    writer.publish(_native.DATA, 1, 0, 256, 256, 0, (), ())
    assert reader.next(0.0) is not None
    assert reader.next(0.0) is None
    assert struct.unpack("<Q", line.tobytes()[:8]) == (1,)
    assert struct.unpack("<Q", control.tobytes()[256:264]) == (1,)
    reader.leave()
    assert line.tobytes()[:8] == b"\xff" * 8
    with pytest.raises(ValueError, match="reader 1 is taken by process 815"):
        _native.RingReader(control, 1, 816, STARTED)


def test_the_descriptor_bytes_are_frozen_for_version_1() -> None:
    _control, writer = a_control()
    data = np.zeros(3 * 4096, np.uint8)
    writer.use_data(data, 4096)
    writer.begin(0.0)
    writer.publish(_native.DATA, 7, 2, 0x600, 0x600, 5, (-1, 258), (3,))
    raw = data.tobytes()
    assert raw[:48].hex(" ") == (
        "00 00 00 00 00 00 00 00 00 00 00 00 07 00 00 00 "  # version 0, DATA, layout 7
        "00 06 00 00 00 00 00 00 00 06 00 00 00 00 00 00 05 00 00 00 00 00 00 00 "  # used, blob at, blob bytes
        "02 00 00 00 01 00 00 00"  # 2 fields, 1 ragged
    )
    assert struct.unpack("<8q", raw[48:112]) == (-1, 258, 0, 0, 0, 0, 0, 0)
    assert struct.unpack("<16q", raw[112:240]) == (3, *[0] * 15)
    assert raw[240:] == bytes(len(raw) - 240)


def test_the_field_table_bytes_are_frozen_for_version_1() -> None:
    spec = BatchSpec(
        fields=(
            Field(name="tokens", dtype="int64", shape=(2, 5)),
            Field(name="cu_seqlens", dtype="int32", shape=(9,), ragged=True),
        ),
        aliases=(("input_ids", "tokens"),),
    )
    slot = np.zeros(4096, np.uint8)
    layout.write_table(slot, layout.lay_out(spec))
    table = slot.tobytes()[256:]
    name, dtype, offset, *shape, num_dimensions, ragged = struct.unpack("<40s16sQ6qIi8x", table[:128])
    assert (name.rstrip(b"\0"), dtype.rstrip(b"\0"), offset) == (b"tokens", b"<i8", 640)
    assert (shape, num_dimensions, ragged) == ([2, 5, 0, 0, 0, 0], 2, -1)
    name, dtype, offset, *shape, num_dimensions, ragged = struct.unpack("<40s16sQ6qIi8x", table[128:256])
    assert (name.rstrip(b"\0"), dtype.rstrip(b"\0"), offset) == (b"cu_seqlens", b"<i4", 768)
    assert (shape, num_dimensions, ragged) == ([9, 0, 0, 0, 0, 0], 1, 0)
    name, _, offset, *_ = struct.unpack("<40s16sQ6qIi8x", table[256:384])
    assert (name.rstrip(b"\0"), offset) == (b"input_ids", 640)


DTYPES = ("int64", "int32", "uint16", "float32", "bool", "complex128")


@st.composite
def specs(draw: st.DrawFn) -> BatchSpec:
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=6))
    fields = tuple(
        Field(name=f"field {i}", dtype=draw(st.sampled_from(DTYPES)), shape=tuple(shape), ragged=bool(shape and i % 2))
        for i, shape in enumerate(shapes)
    )
    return BatchSpec(fields=fields, aliases=(("another name", "field 0"),) if draw(st.booleans()) else ())


@given(specs())
def test_a_table_reads_back_and_its_fields_are_apart(spec: BatchSpec) -> None:
    plan = layout.lay_out(spec)
    slot = np.zeros(layout.slot_bytes_for(spec, blob_bytes=10), np.uint8)
    layout.write_table(slot, plan)
    layout.DESCRIPTOR_HEAD.pack_into(slot.data, 0, 0, 0, 0, 0, plan.blob_offset, 10, len(plan.places), plan.num_ragged)
    assert layout.read_table(slot) == plan.places
    own = [place for place in plan.places if place.name != "another name"]
    ends = [plan.fields_offset, *(place.offset + place.nbytes for place in own)]
    assert all(place.offset >= end for place, end in zip(own, ends, strict=False)), "no field lies in another"
    assert all(place.offset % FIELD_ALIGNMENT == 0 for place in own)
    for number, place in enumerate(own):
        layout.view(slot, place)[...] = number % 2
    assert all((layout.view(slot, place) == number % 2).all() for number, place in enumerate(own))
    assert len(layout.read_blob(slot)) == 10


@pytest.mark.parametrize(("offset", "nbytes"), [(8, 4096 + 8), (4096, 1)])
def test_a_table_that_points_outside_its_slot_is_refused(offset: int, nbytes: int) -> None:
    slot = np.zeros(4096, np.uint8)
    layout.DESCRIPTOR_HEAD.pack_into(slot.data, 0, 0, 0, 0, 0, offset, nbytes, 1, 0)
    layout.FIELD.pack_into(slot.data, 256, b"x", b"<i8", offset, 1024, 0, 0, 0, 0, 0, 1, -1)
    with pytest.raises(FormatError, match="field 'x' ends outside"):
        layout.read_table(slot)
    with pytest.raises(FormatError, match="metadata"):
        layout.read_blob(slot)
    layout.DESCRIPTOR_HEAD.pack_into(slot.data, 0, 0, 0, 0, 0, 0, 0, 1000, 0)
    with pytest.raises(FormatError, match="1000 fields"):
        layout.read_table(slot)


def test_what_a_type_string_cannot_say_is_refused() -> None:
    structured = Field(name="pair", dtype=[("a", "i4"), ("b", "f4")], shape=(3,))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="split a structured field"):
        layout.lay_out(BatchSpec(fields=(structured,)))
    ragged = tuple(Field(name=f"r{i}", dtype="i4", shape=(1,), ragged=True) for i in range(_native.MAX_RAGGED + 1))
    with pytest.raises(ConfigError, match="at most 16"):
        layout.lay_out(BatchSpec(fields=ragged))


@pytest.mark.parametrize(("at", "value", "message"), [
    (0, b"NOTAHEAD", "not the control bytes"),
    (8, b"\x02", "layout version 2"),
    (12, b"\x01", "contradict"),  # one slot
    (16, b"\x03", "contradict"),  # more readers than lines
    (20, b"\x03", "contradict"),  # hold == num_slots
])  # fmt: skip
def test_foreign_or_broken_control_bytes_are_refused(at: int, value: bytes, message: str) -> None:
    control, _writer = a_control()
    control[at : at + len(value)] = np.frombuffer(value, np.uint8)
    with pytest.raises(ValueError, match=message):
        _native.RingReader(control, 0, 1, 1)


def test_a_slot_that_holds_another_version_than_was_published_is_noticed() -> None:
    control, writer = a_control()
    data = np.zeros(3 * 4096, np.uint8)
    writer.use_data(data, 4096)
    reader = _native.RingReader(control, 0, 1, 1)
    reader.use_data(data, 4096)
    writer.begin(0.0)
    writer.publish(_native.DATA, 1, 0, 256, 256, 0, (), ())
    data[0] = 9
    with pytest.raises(RuntimeError, match="holds version 9 where 0 was published"):
        reader.next(0.0)
