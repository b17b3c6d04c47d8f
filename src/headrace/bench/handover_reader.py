"""A reading process of `headrace bench handover`: `python -m headrace.bench.handover_reader CHARGE`.

It obeys one command per line of its standard input and answers each with a line of JSON:

    ready COUNT GAP_S    COUNT hand-overs are there: take them, GAP_S of sleep before each; nanoseconds of each
    wake COUNT           take COUNT hand-overs as they come; nanoseconds since each one's stamp
    idle                 take one hand-over that comes late; CPU seconds and wall seconds of the wait
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from headrace import _native
from headrace.bench.bare_futex import BareFutex
from headrace.bench.handover_charges import ReaderCharge
from headrace.bench.iceoryx2_ring import Place, Services, Subscriber, counts_at
from headrace.shm.peers import WRITER, Peer, Watch, open_pidfd
from headrace.shm.ring_reader import RingReader
from headrace.shm.waiting import RingConfig

clock = time.perf_counter_ns  # CLOCK_MONOTONIC: the same for all processes of a machine


Take = Callable[[], int]
"""Takes the next hand-over and looks at what it brings; returns its stamp in nanoseconds. Blocks until it is there."""


def main() -> None:
    take = taker(msgspec.json.decode(sys.argv[1], type=ReaderCharge))
    answer("up")
    for line in sys.stdin:
        name, *arguments = line.split()
        if name == "ready":
            answer(time_ready(take, int(arguments[0]), float(arguments[1])))
        elif name == "wake":
            answer(time_wakes(take, int(arguments[0])))
        else:
            answer(time_idle(take))


def taker(charge: ReaderCharge) -> Take:
    """How to take a hand-over of one contender."""
    if charge.contender == "clock":
        return lambda: 0
    if charge.contender == "futex":
        return BareFutex(charge.futex_fd).sleep
    if charge.contender == "iceoryx2":
        assert charge.iceoryx2_place is not None, "iceoryx2 needs a place for its files"
        return take_from_iceoryx2(charge, Place(**charge.iceoryx2_place))
    return take_from_ring(charge)


def take_from_ring(charge: ReaderCharge) -> Take:
    """With its arrays, which are views, as a feed takes them."""
    writer = Peer(
        who="the bench", rank=None, pid=charge.writer_pid, started=charge.writer_started,
        pidfd=open_pidfd(charge.writer_pid),
    )  # fmt: skip
    ring: RingReader[np.ndarray] = RingReader(
        RingConfig(num_slots=charge.num_slots),
        index=charge.index,
        who=f"reader {charge.index}",
        control_fd=charge.control_fd,
        data_fd=charge.data_fd,
        slot_bytes=charge.slot_bytes,
        watch=Watch({WRITER: writer}),
        receive_data=lambda: (-1, 0),
        wrap=lambda array: array,
    )

    class Lender(_native.Lender):
        def _next_slowly(self) -> _native.Batch:
            delivery = ring.next()
            return _native.Batch(ring.arrays(delivery), delivery[0], delivery[4], None, ring.slot(delivery))

    lender = Lender()
    ring.lend_to(lender, _native.Batch)

    def take() -> int:
        stamp: int = next(lender).consumed_samples  # the first of its counts
        return stamp

    return take


def take_from_iceoryx2(charge: ReaderCharge, place: Place) -> Take:
    """With its views, kept by address."""
    subscriber = Subscriber(Services(place, num_slots=charge.num_slots, num_readers=charge.num_readers))
    known: dict[int, Any] = {}

    def take() -> int:
        address = subscriber.receive()
        counts = known.get(address)
        if counts is None:
            counts = known[address] = counts_at(address)
        stamp: int = counts[0]
        return stamp

    return take


def time_ready(take: Take, count: int, gap_s: float) -> list[int]:
    """Nanoseconds of each call, one pair of looks at the clock included."""
    values = []
    for _ in range(count):
        if gap_s:
            time.sleep(gap_s)
        start = clock()
        take()
        values.append(clock() - start)
    return values


def time_wakes(take: Take, count: int) -> list[int]:
    """Nanoseconds from each stamp to the return of the call that slept until then."""
    values = []
    for _ in range(count):
        stamp = take()
        values.append(clock() - stamp)
    return values


def time_idle(take: Take) -> tuple[float, float]:
    """CPU seconds of this process, and wall seconds, until the next hand-over is there."""
    before, start = cpu_s(), time.monotonic()
    take()
    return cpu_s() - before, time.monotonic() - start


def cpu_s() -> float:
    """User and system time of all threads, by getrusage."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
