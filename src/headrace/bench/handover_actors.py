"""The writing side of `headrace bench handover`: contenders with their reading processes, commanded from here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

import msgspec

from headrace.bench.bare_futex import BareFutex
from headrace.bench.handover_charges import ReaderCharge
from headrace.bench.iceoryx2_ring import Place, Publisher, Services
from headrace.errors import HeadraceError
from headrace.shm.peers import Peer, Watch, start_time
from headrace.shm.ring_writer import MIN_SLOT_BYTES, RingWriter
from headrace.shm.waiting import RingConfig
from headrace.spec import BatchSpec, Field

STAMPED = BatchSpec(fields=(Field(name="payload", dtype="int64", shape=(16,)),))
"""As small as may be: filling a batch is another bench's subject."""


clock = time.perf_counter_ns


class Contender(Protocol):
    """A way of handing over, with its readers."""

    name: str
    readers: list[Reader]

    def hand_over(self) -> int:
        """Publish one stamped hand-over and wake who sleeps; nanoseconds that this took the writer."""


class Reader:
    """A reading process. Commands and answers in handover_reader.py."""

    def __init__(self, charge: ReaderCharge, pass_fds: Sequence[int] = ()) -> None:
        # Ctrl-C reaches the whole terminal; a reader is born with it blocked, and ends with the writer.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.bench.handover_reader", msgspec.json.encode(charge).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=pass_fds,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        self.pid = self._process.pid

    def command(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Blocks until the reader has done what it was told. HeadraceError if it ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise HeadraceError(f"a reader of the bench ended early, with exit code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Ring:
    """shm's ring, without a feed."""

    name = "ring"

    def __init__(self, readers: list[Reader], writer: RingWriter) -> None:
        self.readers, self._writer = readers, writer

    def hand_over(self) -> int:
        slot, _ = self._writer.begin(STAMPED)
        start = clock()
        self._writer.publish(slot, counts=(start,), lengths=(), blob=b"")
        return clock() - start


class Iceoryx2:
    """A lean publisher."""

    name = "iceoryx2"

    def __init__(self, readers: list[Reader], publisher: Publisher) -> None:
        self.readers, self._publisher = readers, publisher

    def hand_over(self) -> int:
        sample, counts, _ = self._publisher.begin()
        counts[0] = start = clock()
        self._publisher.publish(sample)
        return clock() - start


class Futex:
    """Nothing but a wake."""

    name = "futex"

    def __init__(self, readers: list[Reader], futex: BareFutex) -> None:
        self.readers, self._futex = readers, futex

    def hand_over(self) -> int:
        start = clock()
        self._futex.wake(start)
        return clock() - start


@contextmanager
def open_ring(num_readers: int, num_slots: int) -> Iterator[Ring]:
    """A ring whose writer is this process, and its readers, attached."""
    readers: list[Reader] = []
    # The writer wants to know its readers, and they its descriptors: the memory is made first, the people follow.
    people: dict[int, Peer] = {}
    watch = Watch(people)
    writer = RingWriter(
        RingConfig(num_slots=num_slots),
        watch=watch,
        num_readers=num_readers,
        slot_bytes=MIN_SLOT_BYTES,
        max_slot_bytes=MIN_SLOT_BYTES,
    )
    try:
        for index in range(num_readers):
            charge = ReaderCharge(
                contender="ring",
                index=index,
                num_readers=num_readers,
                num_slots=num_slots,
                control_fd=writer.control_fd,
                data_fd=writer.data_fd,
                slot_bytes=writer.slot_bytes,
                writer_pid=os.getpid(),
                writer_started=start_time(os.getpid()),
            )
            reader = Reader(charge, (writer.control_fd, writer.data_fd))
            readers.append(reader)
            people[index] = Peer(
                who=f"reader {index}", rank=index, pid=reader.pid, started=start_time(reader.pid), pidfd=None
            )
        for reader in readers:
            reader.answer()
        yield Ring(readers, writer)
    finally:
        for reader in readers:
            reader.close()
        writer.close()
        watch.close()


@contextmanager
def open_iceoryx2(num_readers: int, num_slots: int) -> Iterator[Iceoryx2]:
    """The same over iceoryx2."""
    place = Place.make()
    readers: list[Reader] = []
    try:
        services = Services(place, num_slots=num_slots, num_readers=num_readers)
        publisher = Publisher(services, STAMPED)
        charge = ReaderCharge(
            contender="iceoryx2", num_readers=num_readers, num_slots=num_slots, iceoryx2_place=asdict(place)
        )
        readers += [Reader(charge) for _ in range(num_readers)]
        for reader in readers:
            reader.answer()
        publisher.wait_for_readers()
        yield Iceoryx2(readers, publisher)
    finally:
        for reader in readers:
            reader.close()
        place.sweep()


@contextmanager
def open_futex() -> Iterator[Futex]:
    """One word and one sleeper."""
    futex = BareFutex()
    reader = Reader(ReaderCharge(contender="futex", futex_fd=futex.fd), (futex.fd,))
    try:
        reader.answer()
        yield Futex([reader], futex)
    finally:
        reader.close()
        os.close(futex.fd)
