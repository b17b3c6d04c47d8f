"""Processes killed, stopped, forked and interrupted at every moment: which error, and what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from .company import Company, Died, Raised, raised_by, until_asleep, until_reported


def test_a_dead_writer_is_drained_first_and_all_readers_stop_at_one_version(company: Company) -> None:
    host, readers = company.assemble(3, num_slots=4)
    host.publish(count=3)
    readers[0].next()
    host.kill()
    for reader in readers:
        last = reader.next(2 if reader is readers[0] else 3)
        assert last["version"] == 2
        with pytest.raises(Raised) as caught:
            reader.next()
        error = caught.value
        assert (error.kind, error.numbers["version"], error.numbers["pid"]) == ("PeerGone", 3, host.pid)
        assert error.numbers["rank"] is None, "the feeder is no rank"
    assert "restart the job from its last checkpoint" in error.text


def test_a_batch_that_was_being_written_is_never_seen(company: Company) -> None:
    host, (reader,) = company.assemble(1)
    host.publish()
    host.begin()
    host.kill()
    assert reader.next()["version"] == 0
    with pytest.raises(Raised, match="batch 1") as caught:
        reader.next()
    assert caught.value.kind == "PeerGone"


def test_readers_asleep_hear_of_the_writers_death(company: Company, capsys: pytest.CaptureFixture[str]) -> None:
    host, readers = company.assemble(2)
    for reader in readers:
        reader.begin_call("next")
    for reader in readers:
        until_asleep(reader)
    killed_at = host.kill()
    errors = [raised_by(reader) for reader in readers]
    with capsys.disabled():
        print(f"\n  dead writer known to 2 sleeping readers after {1e3 * (time.monotonic() - killed_at):.0f} ms")
    assert [(error.kind, error.numbers["version"]) for error in errors] == [("PeerGone", 0)] * 2


def test_a_dead_reader_stops_whoever_waits_at_once_and_the_others_at_their_next_call(
    company: Company, capsys: pytest.CaptureFixture[str]
) -> None:
    host, (dying, waiting, busy) = company.assemble(3, num_slots=2)
    host.publish(count=2)
    dying.next()
    waiting.next(2)
    busy.next()
    waiting.begin_call("next")
    until_asleep(waiting)
    host.begin_call("publish")
    until_asleep(host)
    killed_at = dying.kill()
    first, second = raised_by(waiting), raised_by(host)
    with capsys.disabled():
        print(
            f"\n  dead reader known to a sleeping reader and writer after {1e3 * (time.monotonic() - killed_at):.0f} ms"
        )
    with pytest.raises(Raised) as caught:
        busy.next()
    for error in (first, second, caught.value):
        assert (error.kind, error.numbers["rank"], error.numbers["pid"]) == ("PeerGone", 0, dying.pid)


def test_a_dead_reader_that_holds_batches_does_not_freeze_the_writer(company: Company) -> None:
    host, (dying, other) = company.assemble(2, num_slots=4, hold=3)
    host.publish(count=4)
    dying.next(3)
    other.next(4)
    dying.kill()
    with pytest.raises(Raised) as caught:
        host.publish(count=8)
    assert (caught.value.kind, caught.value.numbers["rank"]) == ("PeerGone", 0)
    with pytest.raises(Raised) as caught:
        other.next()
    assert (caught.value.kind, caught.value.numbers["rank"]) == ("PeerGone", 0)


def test_a_rank_that_exits_after_the_end_does_not_take_the_end_from_slower_ones(company: Company) -> None:
    host, (fast, slow) = company.assemble(2, num_slots=4)
    host.publish(count=2)
    host.end()
    assert fast.next(3)["kind"] == 1
    with pytest.raises(Died):
        fast.exit()
    with contextlib.suppress(Raised):
        host.check_readers()
    assert slow.next(2)["version"] == 1
    assert slow.next()["kind"] == 1
    assert slow.next()["kind"] == 1, "it comes again"


def test_everybody_left_in_good_order(company: Company) -> None:
    host, readers = company.assemble(2)
    host.publish()
    for reader in readers:
        reader.next()
        reader.close()
        reader.close()
    with pytest.raises(Raised) as caught:
        host.publish(count=9)
    assert caught.value.kind == "EverybodyLeft"
    with pytest.raises(Raised) as caught:
        readers[0].next()
    assert caught.value.kind == "FeedClosed"


def test_the_sources_error_reaches_every_rank(company: Company) -> None:
    host, readers = company.assemble(2)
    host.publish()
    host.fail("读不到 \udcff".encode("utf-8", "surrogatepass").decode("utf-8", "replace"))
    for reader in readers:
        for _ in range(2):
            with pytest.raises(Raised, match="the data source raised ValueError: 读不到") as caught:
                reader.next(2)
            assert caught.value.kind == "SourceError"


def test_a_writer_that_closes_before_its_end_says_so(company: Company) -> None:
    host, (reader,) = company.assemble(1)
    host.publish()
    host.close()
    host.close()
    assert reader.next()["version"] == 0
    with pytest.raises(Raised, match="closed the feed before its end"):
        reader.next()


# ---- stopped is not dead ---------------------------------------------------------------------------------------------


def test_a_stopped_writer_is_reported_and_never_declared_dead(company: Company) -> None:
    host, (reader,) = company.assemble(1, stall_warning_s=0.2)
    host.signal(signal.SIGSTOP)
    reader.begin_call("next")
    report = until_reported(reader)
    time.sleep(0.7)  # that nothing more happens is what is tested
    assert reader.is_waiting()
    host.signal(signal.SIGCONT)
    host.publish()
    assert reader.answer()["version"] == 0
    assert reader.reports() == [report], "once per stall"
    assert f"version 0 from the feeder (pid {host.pid}, stopped by a signal), which has published 0" in report
    assert "stalled for " in report
    assert f"rank 0 (pid {reader.pid}) waits" in report


def test_a_stopped_reader_is_reported_and_never_declared_dead(company: Company) -> None:
    host, (stopped, other) = company.assemble(2, num_slots=2, stall_warning_s=0.2)
    stopped.signal(signal.SIGSTOP)
    host.begin_call("publish", count=3)
    assert other.next(2)["version"] == 1
    report = until_reported(host)
    time.sleep(0.7)
    assert host.is_waiting()
    stopped.signal(signal.SIGCONT)
    assert stopped.next(2)["version"] == 1
    assert host.answer() == 3
    assert host.reports() == [report], "once per stall"
    expected = (
        f"a free slot for version 2: still held by rank 0 (pid {stopped.pid}, stopped by a signal), which has handed"
    )
    assert expected in report


def test_a_wait_that_lasts_too_long_ends_and_says_for_whom(company: Company) -> None:
    host, (slow, other) = company.assemble(2, num_slots=2, timeout_s=0.3)
    with pytest.raises(Raised, match="version 0 from the feeder") as caught:
        other.next()
    assert (caught.value.kind, caught.value.numbers["timeout_s"]) == ("FeedTimeout", 0.3)
    other.begin_call("next", 2)
    with pytest.raises(Raised, match=rf"still held by rank 0 \(pid {slow.pid}, sleeping\)") as caught:
        host.publish(count=3)
    assert caught.value.kind == "FeedTimeout"
    assert other.answer()["version"] == 1
    assert slow.next(2)["version"] == 1, "a timeout ends the call, not the ring"
    assert host.publish() == 3


# ---- growing ---------------------------------------------------------------------------------------------------------


def test_batches_that_grow_several_times_keep_their_order_and_the_held_ones(company: Company) -> None:
    host, readers = company.assemble(2, num_slots=4, hold=2)
    host.publish(count=1)
    for reader in readers:
        reader.begin_call("next", 4)
    for num_values in (20_000, 40_000, 80_000):
        host.grow(num_values)
        host.publish(num_values)
    for reader in readers:
        assert reader.answer() == {"version": 6, "kind": 0, "num_values": 80_000}
        assert reader.held_values() == [6]
        assert reader.num_segments() <= 2, "smaller segments go with their last view"


@pytest.mark.parametrize("moment", ["hand_out", "resize"])
def test_a_writer_that_dies_while_it_grows(company: Company, moment: str) -> None:
    host, readers = company.assemble(2)
    host.publish()
    with pytest.raises(Died):
        host.grow(50_000, die_before=moment)
    for reader in readers:
        assert reader.next()["version"] == 0
        with pytest.raises(Raised) as caught:
            reader.next()
        assert (caught.value.kind, caught.value.numbers["version"]) == ("PeerGone", 1)


def test_a_reader_without_memory_for_larger_slots_says_so_and_the_writer_hears(company: Company) -> None:
    host, (poor, other) = company.assemble(2, num_slots=2)
    pages = int(Path(f"/proc/{poor.pid}/statm").read_text().split()[0])
    poor.limit("RLIMIT_AS", pages * os.sysconf("SC_PAGESIZE") + (1 << 20))
    host.grow(2_000_000)
    with pytest.raises(Raised, match="RLIMIT_AS") as caught:
        poor.next()
    assert caught.value.kind == "ConfigError"
    with pytest.raises(Raised, match="RLIMIT_AS"):
        poor.next()
    poor.close()
    host.begin_call("publish", 2_000_000, count=3)
    assert other.next(3)["version"] == 3
    assert host.answer() == 4


def test_what_exceeds_the_ceiling_is_refused_with_its_numbers(company: Company) -> None:
    host, (reader,) = company.assemble(1, max_slot_bytes=1 << 20)
    with pytest.raises(Raised) as caught:
        host.grow(1_000_000)
    error = caught.value
    assert (error.kind, error.numbers["have"], error.numbers["knob"]) == ("BatchTooLarge", 1 << 20, "max_slot_bytes")
    assert error.numbers["need"] >= 8_000_000
    before = host.num_descriptors()
    with pytest.raises(Raised):
        host.grow(1_000_000)
    assert host.num_descriptors() == before
    host.publish()
    assert reader.next()["version"] == 0


# ---- everything at once ----------------------------------------------------------------------------------------------


def shared_memory_kib() -> int:
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:")]
    return int(line.split()[1])


def test_nothing_is_left_when_everybody_is_killed_and_the_next_run_starts(capsys: pytest.CaptureFixture[str]) -> None:
    before_kib = shared_memory_kib()
    for _ in range(3):
        company = Company()
        host, readers = company.assemble(2, slot_bytes=64 << 20, max_slot_bytes=64 << 20)
        host.publish(count=2)
        assert readers[0].next()["version"] == 0
        assert shared_memory_kib() > before_kib + (200 << 10), "the ring of 256 MiB is there"
        assert company.disband() == ""
    after_kib = shared_memory_kib()
    with capsys.disabled():
        print(f"\n  Shmem: {before_kib >> 10} MiB before, {after_kib >> 10} MiB after three killed rings of 256 MiB")
    assert after_kib < before_kib + (200 << 10)


def test_a_parent_that_is_killed_leaves_readers_that_end_by_themselves() -> None:
    """The writer is the child of rank 0 in a job; here rank 0 dies, and the other rank names it."""
    company = Company()
    host, (leader, other) = company.assemble(2)
    host.publish()
    leader.next()
    other.next()
    other.begin_call("next")
    until_asleep(other)
    leader.kill()
    assert raised_by(other).numbers["rank"] == 0
    with pytest.raises(Raised) as caught:
        host.check_readers()
    assert caught.value.numbers["rank"] == 0
    assert company.disband() == ""
