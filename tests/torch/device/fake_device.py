"""A device whose streams run when they are told to, so that a test decides what is over and what is not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from headrace.torch.pinning import Pinning


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.passed = False
        self.recorded = False

    def record(self, stream: FakeStream) -> None:
        self.passed, self.recorded = False, True

        def pass_by() -> bool:
            self.passed = True
            return True

        stream.work.append(pass_by)

    def query(self) -> bool:
        return self.passed or not self.recorded

    def synchronize(self) -> None:
        self._device.host_waits += not self.query()
        while not self.query():
            assert self._device.run_one(), "the host waits for something that never happens"


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.work: list[Callable[[], bool]] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.work.append(event.query)


class FakeDevice:
    """A Backend. Work is a list per stream; `run_one` does the next possible piece of it, `run_all` everything."""

    def __init__(self, *, can_pin: bool = True) -> None:
        self.main = FakeStream("main")
        self.streams = [self.main]
        self._current = self.main
        self.host_waits = 0
        self.copied_bytes: list[int] = []
        self.pinned: dict[int, int] = {}
        self._can_pin = can_pin

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream("side"))
        return self.streams[-1]

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        return self._current

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        previous, self._current = self._current, stream
        yield
        self._current = previous

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def move() -> bool:
            target.copy_(source)
            self.copied_bytes.append(source.nbytes)
            return True

        self._current.work.append(move)

    def compute(self, work: Callable[[], object]) -> None:
        """Enqueue the user's own work on the current stream."""

        def run() -> bool:
            work()
            return True

        self._current.work.append(run)

    def pin(self, address: int, nbytes: int) -> Pinning:
        if not self._can_pin:
            return Pinning(is_pinned=False, note="no", undo=lambda: None)
        assert address not in self.pinned, "registered twice"
        self.pinned[address] = nbytes
        return Pinning(is_pinned=True, note="yes", undo=lambda: self.pinned.pop(address))

    def run_one(self) -> bool:
        for stream in self.streams:
            if stream.work and stream.work[0]():
                stream.work.pop(0)
                return True
        return False

    def run_all(self) -> None:
        while self.run_one():
            pass
