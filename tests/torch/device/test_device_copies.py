"""What reaches the device, when a slot may be written again, and that the host never waits for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.shm.slots import ReadableSlots, WritableSlots, split
from headrace.spec import BatchSpec, Field
from headrace.torch.device import Copy, DeviceCopies
from headrace.torch.feed import as_tensor

from .fake_device import FakeDevice

SPEC = BatchSpec(
    fields=(
        Field(name="tokens", dtype="int64", shape=(2, 8)),
        Field(name="loss_mask", dtype="float32", shape=(2, 8)),
        Field(name="cu_seqlens", dtype="int32", shape=(17,), ragged=True),
    )
)
NUM_SLOTS, SLOT_BYTES = 3, 8192


class Arena:
    """Slots in ordinary memory, written and read as the ring does."""

    def __init__(self) -> None:
        memory = np.zeros(NUM_SLOTS * SLOT_BYTES, np.uint8)
        self.slots = split(memory, NUM_SLOTS, SLOT_BYTES)
        self._writable = WritableSlots(self.slots)
        self._readable = ReadableSlots(as_tensor)
        self._readable.use(self.slots)

    def write(self, slot: int, value: int) -> None:
        arrays = self._writable.arrays(slot, SPEC)
        arrays["tokens"][:] = value
        arrays["loss_mask"][:] = value / 2
        arrays["cu_seqlens"][:3] = (0, value, 16)
        _, layout = self._writable.layout(slot)
        self.slots[slot][40:44].view(np.uint32)[0] = len(layout.places)  # num_fields of the descriptor

    def tensors(self, slot: int) -> dict[str, torch.Tensor]:
        return self._readable.arrays(slot, 1, (3,))


@pytest.fixture
def arena() -> Arena:
    return Arena()


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def start(copies: DeviceCopies, arena: Arena, slot: int) -> Copy:
    return copies.start(arena.slots[slot], arena.tensors(slot))


def test_a_batch_arrives_whole_in_one_copy(arena: Arena, device: FakeDevice) -> None:
    arena.write(0, 6)
    tensors = start(DeviceCopies(device, num_slabs=2), arena, 0).hand_over()
    device.run_all()
    assert tensors["tokens"].tolist() == [[6] * 8] * 2
    assert tensors["loss_mask"].dtype == torch.float32
    assert tensors["loss_mask"].tolist() == [[3.0] * 8] * 2
    assert tensors["cu_seqlens"].tolist() == [0, 6, 16]
    assert len(device.copied_bytes) == 1
    assert device.copied_bytes[0] < SLOT_BYTES, "only the used part of the slot travels"


def test_computation_waits_for_the_copy_on_the_device_and_the_host_does_not(arena: Arena, device: FakeDevice) -> None:
    arena.write(0, 6)
    tensors = start(DeviceCopies(device, num_slabs=2), arena, 0).hand_over()
    seen: list[int] = []
    device.compute(lambda: seen.append(int(tensors["tokens"][0, 0])))
    device.run_all()
    assert seen == [6]
    assert device.host_waits == 0


def test_a_slot_is_kept_until_its_copy_is_over(arena: Arena, device: FakeDevice) -> None:
    arena.write(0, 6)
    copy = start(DeviceCopies(device, num_slabs=2), arena, 0)
    assert not copy.has_left_host()
    copy.wait_until_left_host()
    assert copy.has_left_host()
    arena.write(0, 7)
    device.run_all()
    assert copy.tensors["tokens"][0, 0] == 6


def test_a_slab_is_filled_again_only_when_the_computation_is_done_with_it(arena: Arena, device: FakeDevice) -> None:
    copies = DeviceCopies(device, num_slabs=2)
    seen: list[int] = []
    for step in range(6):
        arena.write(step % NUM_SLOTS, step)
        copy = start(copies, arena, step % NUM_SLOTS)
        tensors = copy.hand_over()
        device.compute(lambda tensors=tensors: seen.append(int(tensors["tokens"][0, 0])))
        copy.retire()
        if step % NUM_SLOTS == NUM_SLOTS - 1:  # three batches in flight over two slabs, nothing has run yet
            device.run_all()
    assert seen == list(range(6))
    assert device.host_waits == 0


def test_views_of_a_slab_are_made_once(arena: Arena, device: FakeDevice) -> None:
    copies = DeviceCopies(device, num_slabs=1)
    arena.write(0, 1)
    arena.write(1, 2)
    first, second = start(copies, arena, 0), start(copies, arena, 1)
    assert first.tensors["tokens"] is second.tensors["tokens"]


def test_the_ring_is_pinned_once_and_again_when_it_has_grown(arena: Arena, device: FakeDevice) -> None:
    copies = DeviceCopies(device, num_slabs=2)
    arena.write(0, 1)
    start(copies, arena, 0)
    start(copies, arena, 0)
    assert len(device.pinned) == 1
    grown = Arena()
    grown.write(0, 2)
    first_address = next(iter(device.pinned))
    start(copies, grown, 0)
    assert len(device.pinned) == 1
    assert first_address not in device.pinned, "undone before the old memory is unmapped"
    copies.close()
    copies.close()
    assert not device.pinned


def test_memory_that_cannot_be_pinned_is_copied_all_the_same(arena: Arena) -> None:
    device = FakeDevice(can_pin=False)
    copies = DeviceCopies(device, num_slabs=2)
    arena.write(0, 6)
    tensors = start(copies, arena, 0).hand_over()
    device.run_all()
    assert tensors["tokens"][0, 0] == 6
    assert copies.pinning is not None
    assert copies.pinning.note == "no"
