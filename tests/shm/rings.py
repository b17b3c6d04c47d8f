"""Two rings with one interface: the real one, and its twin in pure Python that is too simple to be wrong.

Nothing blocks here: `publish` and `take` say False or None where the real ring would wait.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from headrace import _native
from headrace.errors import BatchTooLarge
from headrace.shm.peers import WRITER, Peer, Watch, open_pidfd, start_time
from headrace.shm.ring_reader import RingReader
from headrace.shm.ring_writer import DATA, END, ERROR, RESIZE, RingWriter
from headrace.shm.waiting import RingConfig
from headrace.spec import BatchSpec, Field

Taken = tuple[int, int, int]
"""Version, kind, number of values."""

SMALL_SLOT_BYTES = 36_864
MAX_SLOT_BYTES = 400_000


class Ring(Protocol):
    """One writer and N readers in one process."""

    def attach(self, reader: int) -> None:
        """`reader` will read from version 0 on. Once per reader."""

    def publish(self, num_values: int) -> bool:
        """Write a batch whose values are all its version. False: no slot is free, or nobody reads any more."""

    def finish(self, kind: int) -> bool:
        """END or ERROR, the last version. False as above."""

    def take(self, reader: int) -> Taken | None:
        """The next version; None: there is none yet. Versions older than the last `hold` are handed back."""

    def release(self, reader: int) -> None:
        """Hand back everything taken."""

    def leave(self, reader: int) -> None:
        """Read no more."""

    def held(self, reader: int) -> list[tuple[int, set[int]]]:
        """Of each batch that is still valid for the reader: its version, and the distinct values that lie there now."""

    def close(self) -> None: ...


def needed_bytes(num_values: int) -> int:
    """What lay_out says, said again: descriptor, one field, values to the next 128, blob, to the next page."""
    return -(-(256 + 128 + -(-8 * num_values // 128) * 128 + 64) // 4096) * 4096


@dataclass
class TwinRing:
    num_slots: int
    num_readers: int
    hold: int
    slot_bytes: int = SMALL_SLOT_BYTES
    published: list[Taken] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.position = [0] * self.num_readers
        self.released: list[float] = [0] * self.num_readers

    def attach(self, reader: int) -> None:
        pass

    def _can_write(self) -> bool:
        slowest = min(self.released)
        return slowest < float("inf") and slowest >= len(self.published) - self.num_slots + 1

    def publish(self, num_values: int) -> bool:
        if self._can_write() and needed_bytes(num_values) > self.slot_bytes:
            half_as_much_again = -(-self.slot_bytes * 3 // 2 // 4096) * 4096
            self.slot_bytes = max(needed_bytes(num_values), min(half_as_much_again, MAX_SLOT_BYTES // 4096 * 4096))
            self.published.append((len(self.published), RESIZE, 0))
        if not self._can_write():
            return False
        self.published.append((len(self.published), DATA, num_values))
        return True

    def finish(self, kind: int) -> bool:
        if not self._can_write():
            return False
        self.published.append((len(self.published), kind, 0))
        return True

    def take(self, reader: int) -> Taken | None:
        while True:
            position = self.position[reader]
            self.released[reader] = max(self.released[reader], position - self.hold + 1)
            if position == len(self.published):
                return None
            taken = self.published[position]
            if taken[1] in (END, ERROR):
                self.released[reader] = float("inf")
                return taken
            self.position[reader] += 1
            if taken[1] == DATA:
                return taken

    def release(self, reader: int) -> None:
        self.released[reader] = max(self.released[reader], self.position[reader])

    def leave(self, reader: int) -> None:
        self.released[reader] = float("inf")

    def held(self, reader: int) -> list[tuple[int, set[int]]]:
        if self.released[reader] == float("inf"):
            return []
        versions = range(int(self.released[reader]), self.position[reader])
        return [(v, {v} if self.published[v][2] else set()) for v in versions if self.published[v][1] == DATA]

    def close(self) -> None:
        pass


def this_process(who: str) -> Peer:
    pid = os.getpid()
    return Peer(who=who, rank=0, pid=pid, started=start_time(pid), pidfd=open_pidfd(pid))


class Lender(_native.Lender):
    """Takes what is known by itself; without waiting: None where there is nothing."""

    def __init__(self, ring: RingReader[np.ndarray]) -> None:
        self._ring, self._hold = ring, ring.config.hold
        self._lend_from(ring._ring, ring._slots.known, _native.Batch, 0.0)

    def _next_slowly(self) -> _native.Batch | _native.Delivery | None:
        # As RingReader.next does, which would wait.
        while (delivery := self._ring._native.next(0.0)) is not None and delivery[2] == RESIZE:
            self._ring._move()
        if delivery is None or delivery[2] != DATA:
            return delivery
        return _native.Batch(self._ring.arrays(delivery), 0, delivery[4], None, self._ring.slot(delivery))


class RealRing:
    """The ring as it ships. Its calls would wait where the twin says no, so ask the native end first, with 0 s."""

    def __init__(self, num_slots: int, num_readers: int, hold: int) -> None:
        self.config = RingConfig(num_slots=num_slots, hold=hold)
        people = {WRITER: this_process("writer")} | {i: this_process(f"reader {i}") for i in range(num_readers)}
        self.watch = Watch(people)
        self.writer = RingWriter(
            self.config,
            watch=self.watch,
            num_readers=num_readers,
            slot_bytes=SMALL_SLOT_BYTES,
            max_slot_bytes=MAX_SLOT_BYTES,
        )
        # What a reader gets that attaches late: the first segment, and then every larger one.
        self.segments: list[deque[tuple[int, int]]] = [deque() for _ in range(num_readers)]
        self.first = (os.dup(self.writer.data_fd), self.writer.slot_bytes)
        self.readers: dict[int, RingReader[np.ndarray]] = {}
        self.lenders: dict[int, Lender] = {}
        self.views: dict[int, deque[tuple[int, np.ndarray]]] = {i: deque() for i in range(num_readers)}
        self.handed_back = [0] * num_readers

    def attach(self, reader: int) -> None:
        self.readers[reader] = RingReader(
            self.config,
            index=reader,
            who=f"reader {reader}",
            control_fd=self.writer.control_fd,
            data_fd=self.first[0],
            slot_bytes=self.first[1],
            watch=self.watch,
            receive_data=self.segments[reader].popleft,
            wrap=lambda array: array,
        )
        self.lenders[reader] = Lender(self.readers[reader])

    def _hand_out(self, fd: int, slot_bytes: int) -> None:
        for waiting in self.segments:
            waiting.append((os.dup(fd), slot_bytes))

    def publish(self, num_values: int) -> bool:
        spec = BatchSpec(fields=(Field(name="values", dtype="int64", shape=(num_values,)),))
        for _ in range(2):
            if self.writer._native.begin(0.0) is None:
                return False
            try:
                slot, arrays = self.writer.begin(spec)
                break
            except BatchTooLarge:
                self.writer.grow(spec, blob_bytes=64, hand_out=self._hand_out)
        arrays["values"][:] = self.writer.published
        self.writer.publish(slot, counts=(num_values,), lengths=(), blob=b"")
        return True

    def finish(self, kind: int) -> bool:
        if self.writer._native.begin(0.0) is None:
            return False
        self.writer.finish(kind)
        return True

    def take(self, reader: int) -> Taken | None:
        ring, views, taken = self.readers[reader], self.views[reader], next(self.lenders[reader])
        if taken is None:
            self._drop(reader, ring.version - self.config.hold + 1)
            return None
        if isinstance(taken, tuple):
            views.clear()
            return taken[0], taken[2], taken[4][0]
        version = ring.version - 1
        views.append((version, taken["values"]))
        self._drop(reader, version - self.config.hold + 1)
        return version, DATA, taken.consumed_samples

    def _drop(self, reader: int, oldest: int) -> None:
        self.handed_back[reader] = max(oldest, self.handed_back[reader])
        while self.views[reader] and self.views[reader][0][0] < self.handed_back[reader]:
            self.views[reader].popleft()

    def release(self, reader: int) -> None:
        self.readers[reader].release()
        self._drop(reader, self.readers[reader].version)

    def leave(self, reader: int) -> None:
        self.readers[reader].close()
        self.views[reader].clear()

    def held(self, reader: int) -> list[tuple[int, set[int]]]:
        return [(version, set(values.tolist())) for version, values in self.views[reader]]

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()
        self.views.clear()
        self.writer.close()
        self.watch.close()
        os.close(self.first[0])
        for waiting in self.segments:
            while waiting:
                os.close(waiting.popleft()[0])


def released_of(ring: Ring) -> tuple[float, ...]:
    """Per reader the versions handed back, infinity for one that left."""
    if isinstance(ring, TwinRing):
        return tuple(ring.released)
    assert isinstance(ring, RealRing)
    return tuple(float("inf") if count == _native.LEFT else count for count in ring.writer._native.released)
