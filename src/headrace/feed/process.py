"""The feeder process: `python -P -m headrace.feed.process headrace-feeder FD`. See feeder.py for who starts it.

It ends when its data end, when all its readers have left, when one of them died, or when the rank that started it died:
then that rank is the one that the others name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import pickle
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NoReturn

from headrace.errors import HeadraceError
from headrace.feed.digests import DigestedProduction
from headrace.feed.feeder import NAME, Charge
from headrace.feed.hosting import bring_up
from headrace.feed.production import Production
from headrace.feed.shard import open_shard
from headrace.position import Position
from headrace.shm import placement
from headrace.shm.handover import Door
from headrace.shm.peers import start_time
from headrace.shm.ring_writer import EverybodyLeft, RingWriter

log = logging.getLogger("headrace")


class _Stop(BaseException):
    """Raised wherever the main thread is, so that the source's own clean-up runs."""


def main() -> int:
    with open(int(sys.argv[2]), "rb") as file:
        file.seek(0)
        charge: Charge = pickle.load(file)
    settle_in(charge)
    parent = Parent(charge)
    parent.watch()
    try:
        return feed(charge, parent)
    except (EverybodyLeft, _Stop):
        return 0


def feed(charge: Charge, parent: Parent) -> int:
    """Bring the ring up and fill it. EverybodyLeft; returns 1 after a failure that the ranks know of."""
    door = Door(listener=socket.socket(fileno=charge.listener_fd), nonce=charge.nonce)

    def make_production(position: Position) -> Production:
        threading.Thread(target=_stop_without_readers, args=(door,), daemon=True).start()
        sys.path[:] = charge.sys_path
        source = pickle.loads(charge.source)
        shard = open_shard(source, position, data_rank=charge.data_rank, data_size=charge.data_size, seed=charge.seed)
        return DigestedProduction(shard) if charge.spans_hosts else shard

    # A feeder that waits for a slot is ahead of its readers, as it should be, however long their step or their
    # validation takes: it neither warns nor gives up. A reader that waits for another one does, and names it.
    ring = dataclasses.replace(charge.config.ring, timeout_s=math.inf, stall_warning_s=math.inf)
    try:
        host = bring_up(door, charge.config, ring, make_production, expected=charge.expected, who="the feeder")
    except HeadraceError:
        return 1  # every rank has been told
    parent.ring = host.writer
    try:
        while not host.producer.finished:
            host.producer.produce()
    except HeadraceError:
        return 1  # a rank died: the others see the same and say so
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        host.close()
    return 0


def settle_in(charge: Charge) -> None:
    """Be found in `ps`, leave Ctrl-C to the ranks, and do not preempt them."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, _stop)
    # A source's workers are terminated by the same signal, and have nothing to clean up for us.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    # Under the normal policy a writer that wakes up preempts the rank on its own core and copies there: 180 us per
    # batch became 108 us with this, 570 us became 106 us for 3.7 MB.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # Before the ring is made: its memory comes from where this process runs.
    for note in placement.settle(charge.placement):
        log.warning("the feeder stays where it is: %s", note)


class Parent:
    """The rank that started this process, which ends with it: also while the main thread is inside the user's source,
    which may never return."""

    def __init__(self, charge: Charge) -> None:
        self._pid, self._pidfd = charge.parent_pid, charge.parent_pidfd
        self._index = next(index for index, peer in charge.expected.items() if peer.pid == self._pid)
        self.ring: RingWriter | None = None
        """Where the other ranks are told, once there is one."""

    def watch(self) -> None:
        """In a thread of its own."""
        threading.Thread(target=self._end_with_it, daemon=True).start()

    def _end_with_it(self) -> None:
        self._wait()
        try:
            if self.ring is not None:
                # First of all: otherwise they would miss this process, which ends only because the rank did.
                self.ring.miss(self._index)
        finally:  # whatever the ring says: it may be closing
            os._exit(0)

    def _wait(self) -> None:
        if self._pidfd is not None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll()
        else:
            started = start_time(self._pid)
            while start_time(self._pid) == started and os.getppid() == self._pid:
                select.select([], [], [], 0.1)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise _Stop


def _stop_without_readers(door: Door) -> None:
    """The main thread may be inside the user's source, which may wait for data for ever while nobody wants any."""
    readers = {guest.connection.fileno() for guest in door.guests.values()}
    while readers:
        poll = select.poll()
        for fd in readers:
            poll.register(fd, 0)  # a hang-up is always reported
        readers -= {fd for fd, _ in poll.poll()}
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
