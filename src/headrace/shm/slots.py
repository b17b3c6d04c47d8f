"""The arrays of a slot, made once and handed out again and again.

Building a view costs 1-3 us hot and 20-80 us after an idle gap, so it is done once per slot and layout, and once more
per length for fields whose first dimension varies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from headrace.errors import BatchTooLarge
from headrace.shm.layout import Place, SlotLayout, lay_out, read_table, view, write_table
from headrace.spec import BatchSpec

Array = TypeVar("Array")

# Distinct lengths of ragged fields remembered per slot on average; beyond it the memory is dropped and begins anew.
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


@dataclass(slots=True)
class _Slot(Generic[Array]):
    """One slot as a reader knows it: the arrays of the layout that it held last."""

    memory: np.ndarray
    layout_id: int = -1
    arrays: dict[str, Array | None] = field(default_factory=dict)
    """In the order of the table; None for those of varying length."""
    ragged: list[tuple[tuple[str, ...], np.ndarray, int]] = field(default_factory=list)
    """Names of one array (an alias is no second array), that array at full capacity, which of the lengths it has."""


class ReadableSlots(Generic[Array]):
    """The reader's side. `wrap` turns a NumPy view into what is handed out, such as a tensor of the same memory.

    `known` has what was handed out so far, (arrays, memory of the slot) by (slot, layout id, *lengths), and is one dict
    for ever: native/batch.c looks there first.
    """

    def __init__(self, wrap: Callable[[np.ndarray], Array]) -> None:
        self._wrap = wrap
        self._slots: list[_Slot[Array]] = []
        self.known: dict[tuple[int, ...], tuple[dict[str, Array], np.ndarray]] = {}

    def use(self, slots: list[np.ndarray]) -> None:
        """Read these slots from now on."""
        self.known.clear()
        self._slots = [_Slot(memory) for memory in slots]

    def memory(self, slot: int) -> np.ndarray:
        """The bytes of a slot (uint8); they keep the mapping alive."""
        return self._slots[slot].memory

    def arrays(self, slot: int, layout_id: int, lengths: tuple[int, ...]) -> dict[str, Array]:
        """The arrays of a delivered slot. The dict is shared between deliveries: do not change it."""
        key = (slot, layout_id, *lengths)
        if (known := self.known.get(key)) is not None:
            return known[0]
        if self._slots[slot].layout_id != layout_id:
            self._relay(slot, layout_id)
        of_slot = self._slots[slot]
        arrays: dict[str, Any] = of_slot.arrays.copy()
        for names, full, ragged_index in of_slot.ragged:
            array = self._wrap(full[: lengths[ragged_index]])
            for name in names:
                arrays[name] = array
        if len(self.known) >= MAX_REMEMBERED_LENGTHS * len(self._slots):
            self.known.clear()
        self.known[key] = arrays, of_slot.memory
        return arrays

    def _relay(self, slot: int, layout_id: int) -> None:
        """The slot's table is another one now."""
        memory = self._slots[slot].memory
        new: _Slot[Array] = _Slot(memory)
        by_offset: dict[int, list[Place]] = {}
        for place in read_table(memory):
            new.arrays[place.name] = None
            # A field without elements lies where the next one does.
            by_offset.setdefault(place.offset if place.nbytes else -1 - len(new.arrays), []).append(place)
        for places in by_offset.values():
            names, full, ragged_index = (
                tuple(one.name for one in places),
                view(memory, places[0]),
                places[0].ragged_index,
            )
            if ragged_index >= 0:
                new.ragged.append((names, full, ragged_index))
            else:
                new.arrays.update(dict.fromkeys(names, self._wrap(full)))
        for key in [key for key in self.known if key[0] == slot]:
            del self.known[key]
        new.layout_id = layout_id
        self._slots[slot] = new
