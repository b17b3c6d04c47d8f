"""The devices torch can drive, for measuring: timed events, memory peaks, names. Found by name when asked for.

`torch.cuda`, `torch.npu` and their like have the same functions under another module, so one class serves them all.
torch_npu is imported only for a device called "npu": without its libraries the import fails, and may take torch along.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from headrace.errors import ConfigError
from headrace.measure.clock import DeviceEvent
from headrace.measure.memory import DeviceMemory


class DeviceBackend:
    """What measuring needs of one device. `module` is `torch.cuda`, `torch.npu` ...; None for the CPU."""

    def __init__(self, device: torch.device, module: Any | None) -> None:
        self.device, self.module = device, module
        # None: whatever device is current, as kernels go there; a number: that device, whatever is current.
        self.index = device.index

    @property
    def kind(self) -> str:
        """ "cpu", "cuda", "npu" ..."""
        return self.device.type

    @property
    def asynchronous(self) -> bool:
        """Whether the host only asks for work and somebody else does it."""
        return self.module is not None

    @property
    def blind(self) -> str | None:
        """Why the device's times cannot be seen; None when they can."""
        if self.module is None or hasattr(self.module, "Event"):
            return None
        return f"torch.{self.kind} has no events: the device's times cannot be seen"

    def new_event(self) -> DeviceEvent:
        """A timed event, not yet recorded."""
        assert self.module is not None
        event = self.module.Event(enable_timing=True)
        return event if self.index is None else StreamEvent(event, self.module, self.index)

    def name(self) -> str | None:
        """The product as the driver calls it; None on a CPU."""
        if self.module is None or not hasattr(self.module, "get_device_name"):
            return None
        return str(self.module.get_device_name(self.device))

    def read_memory(self) -> DeviceMemory:
        """Peaks since the last call; starts a new window. Reads counters of the allocator: no synchronisation."""
        assert self.module is not None
        stats = self.module.memory_stats(self.device)
        capacity = None
        if hasattr(self.module, "get_device_properties"):
            capacity = int(self.module.get_device_properties(self.device).total_memory)
        found = DeviceMemory(
            peak_allocated_bytes=int(stats["allocated_bytes.all.peak"]),
            peak_reserved_bytes=int(stats["reserved_bytes.all.peak"]),
            peak_active_bytes=stats.get("active_bytes.all.peak"),
            alloc_retries=stats.get("num_alloc_retries"),
            out_of_memory_errors=stats.get("num_ooms"),
            capacity_bytes=capacity,
        )
        self.module.reset_peak_memory_stats(self.device)
        return found

    def synchronize(self) -> None:
        """Block until the device has done what it was asked for. For the batch size search, never for the loop."""
        if self.module is not None:
            self.module.synchronize(self.device)

    def empty_cache(self) -> None:
        """Give the allocator's unused blocks back to the device."""
        if self.module is not None:
            self.module.empty_cache()

    def random_state(self) -> torch.Tensor | None:
        """The state of the device's default generator."""
        return None if self.module is None else self.module.get_rng_state(self.device)

    def set_random_state(self, state: torch.Tensor | None) -> None:
        """Put back what `random_state` returned."""
        if self.module is not None and state is not None:
            self.module.set_rng_state(state, self.device)


class StreamEvent:
    """An event that is recorded on one device's current stream, although another device may be current.

    The calls are those of `headrace.measure.clock.DeviceEvent`.
    """

    def __init__(self, event: Any, module: Any, index: int) -> None:
        self.event, self.module, self.index = event, module, index

    def record(self) -> None:
        self.event.record(self.module.current_stream(self.index))

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_time(self, end_event: Any, /) -> float:
        return float(self.event.elapsed_time(end_event.event))


def backend_of(device: torch.device | str) -> DeviceBackend:
    """The backend of a device ("cpu", "cuda", "cuda:1", "npu:0"). Raises ConfigError for one torch cannot drive."""
    kind = str(device).split(":", 1)[0]
    if kind == "cpu":
        return DeviceBackend(torch.device("cpu"), None)
    module = device_module(kind)
    if not module.is_available():
        raise ConfigError(f"torch.{kind} finds no device on this machine: pass device='cpu' or check the driver")
    return DeviceBackend(torch.device(device), module)


def device_module(kind: str) -> ModuleType:
    """`torch.<kind>`; for "npu" after importing the extension that brings it."""
    if kind == "npu" and not hasattr(torch, "npu"):
        try:
            importlib.import_module("torch_npu")
        except Exception as error:  # missing package, or missing libraries under it
            raise ConfigError(f"device 'npu' needs torch_npu with CANN: {type(error).__name__}: {error}") from error
    module = getattr(torch, kind, None)
    if not isinstance(module, ModuleType) or not hasattr(module, "is_available"):
        raise ConfigError(f"torch has no device called {kind!r}")
    return module
