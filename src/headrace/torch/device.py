"""The last metre: one copy per batch from a slot to the device, beside the computation.

    slot in the ring --one copy on a side stream--> slab on the device --> tensors, prebuilt views of the slab

The used part of a slot is contiguous, so a batch is one copy, not one per field. The host never waits for the device:
the computing stream waits for the copy on the device, a slot is handed back when the copy's event has passed, and a
slab is filled again when the computing stream has passed the event that ended its use. The copy of the next batch is
started as soon as the current one is handed out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from headrace.shm.placement import device_node
from headrace.spec import ARENA_ALIGNMENT, align
from headrace.torch.pinning import Pinning, pin


class Event(Protocol):
    """Of torch.cuda.Event what is used here; torch.npu.Event has the same names."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Stream(Protocol):
    def wait_event(self, event: Event) -> None: ...


class Backend(Protocol):
    """A device as this module sees it: torch.cuda, torch.npu (see Accelerator), or a fake one in the tests."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8 [nbytes]."""

    def new_stream(self) -> Stream: ...
    def new_event(self) -> Event: ...
    def current_stream(self) -> Stream: ...
    def on(self, stream: Stream) -> AbstractContextManager[Any]: ...
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy on the current stream."""

    def pin(self, address: int, nbytes: int) -> Pinning: ...


class Accelerator:
    """torch's module for a device type. Nothing vendor-specific is imported: the user has done that."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def new_stream(self) -> Stream:
        stream: Stream = self._module.Stream(self._device)
        return stream

    def new_event(self) -> Event:
        event: Event = self._module.Event()
        return event

    def current_stream(self) -> Stream:
        stream: Stream = self._module.current_stream(self._device)
        return stream

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def pin(self, address: int, nbytes: int) -> Pinning:
        return pin(address, nbytes, self._device.type)


class _Place(NamedTuple):
    """Where a tensor lies in its slot, and hence in a slab."""

    name: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(slots=True)
class _Slab:
    memory: torch.Tensor
    views: dict[tuple[_Place, ...], dict[str, torch.Tensor]] = field(default_factory=dict)
    """Tensors by what they show, made once."""
    others: dict[str, torch.Tensor] = field(default_factory=dict)
    """Memory for what does not lie in a slot."""
    used_until: Event | None = None
    """Passed when the computation no longer reads the slab."""


class DeviceCopies:
    """Copies batches to one device. Owns the slabs on it and the pinning of the ring's memory.

    `num_slabs` batches exist on the device at once: the one in use, those the user holds, and the one being copied.
    """

    def __init__(self, backend: Backend, *, num_slabs: int) -> None:
        self._backend = backend
        self._stream = backend.new_stream()
        self._slabs: deque[_Slab] = deque()
        self._num_slabs = num_slabs
        self._arena: Any = None
        self._pinning: Pinning | None = None
        self._last_copy: Event | None = None

    @property
    def pinning(self) -> Pinning | None:
        """Whether the ring's memory is pinned, and why not; None before the first batch."""
        return self._pinning

    def start(self, slot: np.ndarray, tensors: Mapping[str, torch.Tensor]) -> Copy:
        """Begin to copy a batch: the part of `slot` (uint8 [slot_bytes]) that `tensors` show, in one piece.

        What lies elsewhere, because a view was cut from it on the host, is copied tensor by tensor. Does not block. The
        slot must stay as it is until the copy's `has_left_host`.
        """
        self._attend(slot)
        base = slot.ctypes.data
        places = tuple(
            _Place(name, tensor.data_ptr() - base, tensor.dtype, tuple(tensor.shape), tensor.nbytes)
            for name, tensor in tensors.items()
            if tensor.is_contiguous() and 0 <= tensor.data_ptr() - base <= len(slot) - tensor.nbytes
        )
        elsewhere = {name: tensors[name] for name in tensors.keys() - {place.name for place in places}}
        slab = self._next_slab(len(slot))
        done = self._backend.new_event()
        with self._backend.on(self._stream):
            if slab.used_until is not None:
                self._stream.wait_event(slab.used_until)
            if places:
                begin, end = min(place.offset for place in places), max(place.end for place in places)
                self._backend.copy(slab.memory[begin:end], torch.from_numpy(slot[begin:end]))
            arrived = {name: self._copied(slab, name, tensor) for name, tensor in elsewhere.items()}
            done.record(self._stream)
        self._last_copy = done
        return Copy(self._backend, slab, done, {**self._views(slab, places), **arrived})

    def _copied(self, slab: _Slab, name: str, tensor: torch.Tensor) -> torch.Tensor:
        target = slab.others.get(name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            target = slab.others[name] = self._backend.empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self._backend.copy(target, tensor)
        return target

    def _next_slab(self, nbytes: int) -> _Slab:
        """The one whose use ended longest ago; larger ones when the ring's slots have grown."""
        if len(self._slabs) == self._num_slabs:
            slab = self._slabs.popleft()
            if len(slab.memory) >= nbytes:
                self._slabs.append(slab)
                return slab
        slab = _Slab(self._backend.empty(nbytes))
        self._slabs.append(slab)
        return slab

    @staticmethod
    def _views(slab: _Slab, places: tuple[_Place, ...]) -> dict[str, torch.Tensor]:
        known = slab.views.get(places)
        if known is None:
            if len(slab.views) >= 256:  # ragged lengths seen; forget them all rather than keep count
                slab.views.clear()
            known = slab.views[places] = {
                place.name: slab.memory[place.offset : place.end].view(place.dtype).view(place.shape)
                for place in places
            }
        return known

    def _attend(self, slot: np.ndarray) -> None:
        """Pin the memory that the slot is part of, once; after a RESIZE that is another one."""
        arena = slot.base
        if arena is self._arena or not isinstance(arena, np.ndarray):
            return
        self._unpin()
        self._pinning = self._backend.pin(arena.ctypes.data, align(arena.nbytes, ARENA_ALIGNMENT))
        self._arena = arena

    def _unpin(self) -> None:
        if self._last_copy is not None:
            self._last_copy.synchronize()
        if self._pinning is not None:
            self._pinning.undo()
        self._arena = self._pinning = None

    def close(self) -> None:
        """Wait for copies under way and undo the pinning: before the ring's memory is unmapped. Idempotent."""
        self._unpin()
        self._slabs.clear()


def numa_node_of(device: torch.device) -> int | None:
    """The NUMA node that a device is attached to; None for the CPU and where the backend does not tell its address."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:  # not every version of torch tells
        return None
    return device_node(bus)


@dataclass(slots=True)
class Copy:
    """A batch on its way to the device, or there."""

    _backend: Backend
    _slab: _Slab
    _done: Event
    tensors: dict[str, torch.Tensor]
    """Views of device memory, valid until `retire` and the computation enqueued before it. Shared between batches."""

    def hand_over(self) -> dict[str, torch.Tensor]:
        """The tensors, to be used on the current stream, which waits for the copy on the device; the host does not."""
        self._backend.current_stream().wait_event(self._done)
        return self.tensors

    def has_left_host(self) -> bool:
        """Whether the slot may be written again. Does not block."""
        return self._done.query()

    def wait_until_left_host(self) -> None:
        """Block until the slot may be written again: normally long since true."""
        self._done.synchronize()

    def retire(self) -> None:
        """The user is done with the batch: the slab may be filled again after what is enqueued now."""
        event = self._backend.new_event()
        event.record(self._backend.current_stream())
        self._slab.used_until = event
