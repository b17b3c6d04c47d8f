"""Patience and what it says, with a clock of our own; what an error looks like after its journey."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import _native
from headrace.errors import BatchTooLarge, ConfigError, FeedTimeout, FormatError, HeadraceError, PeerGone, SourceError
from headrace.shm import failure
from headrace.shm.peers import WRITER, Peer, Watch, open_pidfd, start_time
from headrace.shm.waiting import Patience, RingConfig


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_report_per_stall_and_then_the_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    config = RingConfig(timeout_s=5.0, stall_warning_s=2.0)
    patience = Patience(config, lambda: "rank 1 (pid 7, sleeping)", clock)
    with caplog.at_level(logging.WARNING, logger="headrace"):
        for _ in range(49):
            clock.now += 0.1
            patience.check()
    assert [record.getMessage() for record in caplog.records] == [
        "stalled for 2.1 s: waiting for rank 1 (pid 7, sleeping)"
    ]
    clock.now += 0.2
    with pytest.raises(FeedTimeout, match=r"waited 5 s for rank 1 .pid 7, sleeping.; all processes are alive"):
        patience.check()


def test_hours_spent_suspended_are_not_held_against_the_others(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    patience = Patience(RingConfig(timeout_s=5.0, stall_warning_s=2.0), lambda: "somebody", clock)
    clock.now += 7200.0
    patience.check()
    assert not caplog.records


def test_a_wait_says_when_there_is_something_to_say_next() -> None:
    clock = Clock()
    patience = Patience(RingConfig(timeout_s=50.0, stall_warning_s=20.0), lambda: "", clock, longest_tick_s=math.inf)
    clock.now += 5.0
    assert patience.check() == pytest.approx(15.0, abs=0.01), "the report"
    clock.now += patience.check()
    assert patience.check() == pytest.approx(30.0, abs=0.01), "the end"
    clock.now += patience.check()
    with pytest.raises(FeedTimeout):
        patience.check()


@pytest.mark.parametrize(("wrong", "message"), [
    ({"num_slots": 1}, "num_slots must be at least 2"),
    ({"num_slots": 2000}, "num_slots must be at most 1024"),
    ({"num_slots": 3, "hold": 3}, "raise num_slots to at least 4"),
    ({"hold": 0}, "hold must lie in"),
    ({"num_slots": "4"}, "num_slots must be a whole number, got '4'"),
    ({"num_slots": 2.5}, "num_slots must be a whole number, got 2.5"),
    ({"hold": None}, "hold must be a whole number, got None"),
    ({"hold": True}, "hold must be a whole number, got True"),
    ({"timeout_s": 0.0}, "timeout_s must be a positive number of seconds, got 0.0"),
    ({"timeout_s": "x"}, "timeout_s must be a positive number of seconds, got 'x'"),
    ({"timeout_s": float("nan")}, "timeout_s must be a positive number of seconds, got nan"),
    ({"stall_warning_s": -1.0}, "stall_warning_s must be a positive number of seconds, got -1.0"),
])  # fmt: skip
def test_an_impossible_ring_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RingConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [
    BatchTooLarge(need=9, have=5, knob="slot_bytes"),
    FeedTimeout("rank 3", timeout_s=2.5),
    ConfigError("no"),
    FormatError("what"),
    PeerGone("rank 3", rank=3, pid=77, version=5, reason="left"),
    SourceError("the data source raised KeyError: 'x'", source_traceback="Traceback ...\nKeyError: 'x'\n"),
])  # fmt: skip
def test_our_own_errors_arrive_as_they_were(error: HeadraceError) -> None:
    arrived = failure.decode(failure.encode(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_the_users_exception_arrives_with_its_traceback() -> None:
    try:
        raise KeyError("tokens")
    except KeyError as error:
        arrived = failure.decode(failure.encode(error))
    assert isinstance(arrived, SourceError)
    assert "KeyError: 'tokens'" in str(arrived)
    assert "test_waiting.py" in arrived.source_traceback


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@given(st.text(st.characters(codec=None), max_size=50), st.integers(0, 3000))
def test_every_error_fits_a_slot(text: str, times: int) -> None:
    # Chinese text, control characters, file names that are not UTF-8: lone surrogates.
    raw = failure.encode(ValueError(text * times))
    assert len(raw) <= failure.MAX_FAILURE_BYTES
    assert isinstance(failure.decode(raw), SourceError)


@pytest.mark.parametrize("text", ["\0" * 100_000, "中" * 100_000, "\udcff" * 100_000, 'quoted "text"\n' * 10_000])
def test_a_long_error_keeps_its_beginning_and_its_end(text: str) -> None:
    arrived = failure.decode(failure.encode(ValueError("first" + text + "last")))
    assert "ValueError: first" in str(arrived)
    assert "last" in str(arrived)
    assert "bytes left out" in str(arrived)


def test_an_exception_that_cannot_be_printed_still_arrives() -> None:
    assert "Unprintable" in str(failure.decode(failure.encode(Unprintable())))


def test_a_watch_names_who_ended_with_and_without_pidfds() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = start_time(child.pid)
        assert started > 0
        by_pidfd = Peer(who="rank 0", rank=0, pid=child.pid, started=started, pidfd=open_pidfd(child.pid))
        by_pid = Peer(who="rank 1", rank=1, pid=child.pid, started=started, pidfd=None)
        reused = Peer(who="rank 2", rank=2, pid=os.getpid(), started=start_time(os.getpid()) - 1, pidfd=None)
        watch = Watch({0: by_pidfd, 1: by_pid, 2: reused})
        assert watch.dead() == [2], "a pid that another process has now is a dead peer"
        assert by_pidfd.describe() == f"rank 0 (pid {child.pid}, sleeping)" or "running" in by_pidfd.describe()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_time(child.pid) == 0, "a zombie has ended"
        assert sorted(watch.dead()) == [0, 1, 2]
        assert by_pidfd.describe() == f"rank 0 (pid {child.pid}, dead)"
        watch.close()
        watch.close()
    assert by_pid.describe() == f"rank 1 (pid {child.pid}, dead)"
    never_seen = Peer(who="rank 3", rank=3, pid=child.pid, started=start_time(child.pid), pidfd=None)
    assert not never_seen.is_alive(), "it was gone before anybody asked when it had started"


def test_a_peer_of_another_pid_namespace_is_not_taken_for_the_process_that_has_its_number_here() -> None:
    alive = Peer(who="rank 0", rank=0, pid=1, started=12345, pidfd=open_pidfd(os.getpid()))
    assert alive.describe() == "rank 0 (pid 1, alive)"
    Watch({0: alive}).close()


def test_a_rank_that_writes_as_well_counts_as_the_writer() -> None:
    me = {"pid": os.getpid(), "started": start_time(os.getpid()), "pidfd": None}
    other = Peer(who="rank 1", rank=1, pid=os.getpid(), started=1, pidfd=None)
    watch = Watch({WRITER: Peer(who="w", rank=0, **me), 0: Peer(who="rank 0", rank=0, **me), 1: other})
    assert watch.is_writer(0)
    assert not watch.is_writer(1), "an equal pid in another namespace is another process"


@pytest.mark.parametrize("timeout_s", [math.inf, 1e10, sys.float_info.max])
def test_a_wait_for_ever_sleeps(timeout_s: float) -> None:
    """In nanoseconds it is no int64: it must not come out as a wait of no time, again and again."""
    control, data = np.zeros(_native.CONTROL_BYTES + _native.LINE_BYTES, np.uint8), np.zeros(2 * 4096, np.uint8)
    writer, reader = _native.RingWriter(control, 2, 1, 1, 1, 1, 1), _native.RingReader(control, 0, 1, 1)
    writer.use_data(data, 4096)
    reader.use_data(data, 4096)
    taken: list[_native.Delivery | None] = []
    thread = threading.Thread(target=lambda: taken.append(reader.next(timeout_s)))
    thread.start()
    thread.join(0.3)  # it must not end, which is the point
    assert thread.is_alive()
    writer.begin(0.0)
    writer.publish(_native.DATA, 1, 0, 256, 256, 0, (), ())
    thread.join()
    assert taken[0] is not None
