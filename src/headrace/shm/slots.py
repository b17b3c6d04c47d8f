"""The arrays of a slot, made once and handed out again and again.

Building a view costs 1-3 us hot and 20-80 us after an idle gap, so it is done once per slot and layout, and once more
per length for fields whose first dimension varies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from headrace.errors import BatchTooLarge
from headrace.shm.layout import Place, SlotLayout, lay_out, read_table, view, write_table
from headrace.spec import BatchSpec

Array = TypeVar("Array")

# Distinct lengths of ragged fields remembered per slot; beyond it the memory is dropped and begins anew.
MAX_REMEMBERED_LENGTHS = 256


def split(data: np.ndarray, num_slots: int, slot_bytes: int) -> list[np.ndarray]:
    """The slots of a data segment (uint8 arrays that keep the mapping alive)."""
    return [data[i * slot_bytes : (i + 1) * slot_bytes] for i in range(num_slots)]


class WritableSlots:
    """The writer's side: knows which layout each slot has, rewrites its table when another one comes."""

    def __init__(self, slots: list[np.ndarray]) -> None:
        self._slots = slots
        self._specs: list[BatchSpec | None] = [None] * len(slots)
        self._layouts: list[SlotLayout | None] = [None] * len(slots)
        self._views: list[dict[str, np.ndarray]] = [{} for _ in slots]
        self._layout_ids = [0] * len(slots)

    def arrays(self, slot: int, spec: BatchSpec) -> Mapping[str, np.ndarray]:
        """The arrays of `slot` for a batch of `spec`, at full capacity, to be filled in place."""
        if self._specs[slot] is not spec and self._specs[slot] != spec:
            self._relay(slot, spec)
        return self._views[slot]

    def _relay(self, slot: int, spec: BatchSpec) -> None:
        layout = lay_out(spec)
        memory = self._slots[slot]
        if layout.blob_offset > len(memory):
            raise BatchTooLarge(need=layout.blob_offset, have=len(memory), knob="slot_bytes")
        write_table(memory, layout)
        self._specs[slot] = spec
        self._layouts[slot] = layout
        self._views[slot] = {place.name: view(memory, place) for place in layout.places}
        self._layout_ids[slot] += 1

    def layout(self, slot: int) -> tuple[int, SlotLayout]:
        """The layout that `arrays` gave the slot last, and its id."""
        layout = self._layouts[slot]
        assert layout is not None, "arrays() comes first"
        return self._layout_ids[slot], layout

    def write_blob(self, slot: int, offset: int, blob: bytes) -> None:
        self._slots[slot][offset : offset + len(blob)] = np.frombuffer(blob, np.uint8)

    def poison(self, slot: int) -> None:
        """Debugging: make whoever still reads this slot see that it is not his any more. The table stays."""
        layout = self._layouts[slot]
        if layout is not None:
            self._slots[slot][layout.fields_offset :] = 0xDB


class ReadableSlots(Generic[Array]):
    """The reader's side. `wrap` turns a NumPy view into what is handed out, such as a tensor of the same memory.

    `memory`, `layout_ids` and `by_lengths` are per slot, to be read by RingReader.take: the layout it held last, and
    the arrays made for that so far.
    """

    def __init__(self, slots: list[np.ndarray], wrap: Callable[[np.ndarray], Array]) -> None:
        self.memory = slots
        self._wrap = wrap
        self.layout_ids = [-1] * len(slots)
        self._places: list[tuple[Place, ...]] = [()] * len(slots)
        self.by_lengths: list[dict[tuple[int, ...], dict[str, Array]]] = [{} for _ in slots]

    def arrays(self, slot: int, layout_id: int, lengths: tuple[int, ...]) -> dict[str, Array]:
        """The arrays of a delivered slot. The dict is shared between deliveries: do not change it."""
        if self.layout_ids[slot] != layout_id:
            self._places[slot] = read_table(self.memory[slot])
            self.by_lengths[slot] = {}
            self.layout_ids[slot] = layout_id
        known = self.by_lengths[slot].get(lengths)
        return known if known is not None else self._build(slot, lengths)

    def _build(self, slot: int, lengths: tuple[int, ...]) -> dict[str, Array]:
        remembered = self.by_lengths[slot]
        if len(remembered) >= MAX_REMEMBERED_LENGTHS:
            remembered.clear()
        same_everywhere: dict[str, Array] = next(iter(remembered.values()), {})
        arrays: dict[str, Any] = {}
        by_offset: dict[int, Array] = {}  # an alias is the same array, not a second one of the same memory
        for place in self._places[slot]:
            if place.ragged_index < 0 and place.name in same_everywhere:
                arrays[place.name] = same_everywhere[place.name]
                continue
            array = by_offset.get(place.offset)
            if array is None:
                full = view(self.memory[slot], place)
                array = self._wrap(full if place.ragged_index < 0 else full[: lengths[place.ragged_index]])
                if place.nbytes:  # a field without elements lies where the next one does
                    by_offset[place.offset] = array
            arrays[place.name] = array
        remembered[lengths] = arrays
        return arrays
