"""A clock that moves when it is told to, and a device that works through a queue behind it."""

from __future__ import annotations

MS = 1_000_000


class FakeClock:
    """Nanoseconds; `advance` moves it."""

    def __init__(self) -> None:
        self.now_ns = 5 * MS

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, *, ms: float) -> None:
        self.now_ns += round(ms * MS)


class FakeDevice:
    """An asynchronous device with one stream. Its clock has another origin than the host's."""

    ORIGIN_MS = 40_000.0

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.free_at_ms = 0.0
        self.synchronised = 0

    def host_ms(self) -> float:
        return self.clock.now_ns / MS

    def launch(self, ms: float) -> None:
        """Ask for work: the host returns at once, the device does it after what it was asked before."""
        self.free_at_ms = max(self.free_at_ms, self.host_ms()) + ms

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at_ms: float | None = None

    def record(self) -> None:
        self.at_ms = max(self.device.free_at_ms, self.device.host_ms())

    def query(self) -> bool:
        return self.at_ms is not None and self.device.host_ms() >= self.at_ms

    def synchronize(self) -> None:
        self.device.synchronised += 1
        self.device.clock.now_ns = max(self.device.clock.now_ns, round(self.at_ms * MS))

    def elapsed_time(self, end: FakeEvent) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("device not ready")
        return (end.at_ms + FakeDevice.ORIGIN_MS) - (self.at_ms + FakeDevice.ORIGIN_MS)
