"""The two clocks of a step: the host's, and the device's as events on its queue. Both are arguments everywhere.

A device works through a queue that the host fills ahead of it: the host's clock around a call says how long it took to
*ask* for the work. An event put into the queue before and after says how long the work took. Events are read when they
have passed, steps later; nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

Clock: TypeAlias = Callable[[], int]
"""Monotonic nanoseconds since an arbitrary origin, such as `time.perf_counter_ns`."""


class DeviceEvent(Protocol):
    """A mark in the device's queue, as `torch.cuda.Event(enable_timing=True)` and `torch.npu.Event` are."""

    def record(self) -> None:
        """Put the mark behind the work asked for so far on the current stream. Does not block."""

    def query(self) -> bool:
        """Whether the device has passed the mark. Does not block."""

    def synchronize(self) -> None:
        """Block until the device has passed the mark. Only called when a measurement is closed."""

    def elapsed_time(self, end_event: DeviceEvent, /) -> float:
        """Milliseconds of device time from this mark to `end_event`, both passed."""


NewEvent: TypeAlias = Callable[[], DeviceEvent]
