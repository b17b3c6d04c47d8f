"""Deaths, stops, interruptions and early leaves: which error, on which rank, at which batch, and what is left."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.feed.group import Group, await_end, feeders_of
from tests.feed.party import Party
from tests.shm.company import Raised

WRITERS = ["feeder", "iterator"]
# How long waits last that are to fail: every other answer comes in milliseconds, on a starved machine in a second.
SHORT_S = 1.5


def one_feeder(group: Group) -> int:
    [feeder] = feeders_of(group)
    return feeder


def until_asleep(group: Group) -> None:
    """Return once every rank waits in the ring or for its first batch."""
    for rank in group.ranks:
        while True:
            channel = Path(f"/proc/{rank.process.pid}/wchan").read_text()
            if "futex" in channel or "poll" in channel:
                break
            os.sched_yield()


def fill(group: Group, ahead: int) -> None:
    """Return once `ahead` batches are published that no rank has taken."""
    while any(stats["ahead"] < ahead for stats in group.all("stats")):
        os.sched_yield()


# ---- the writer dies -------------------------------------------------------------------------------------------------


def test_a_feeder_killed_while_all_wait_is_gone_for_all_at_one_batch(
    assembled: Callable[..., Group], tmp_path: Path
) -> None:
    group = assembled()
    group.make(source="waiting_for_ever", params={"after": 2, "trace": str(tmp_path / "trace")})
    group.all("take", 2)
    group.begin_all("take")
    until_asleep(group)
    feeder = one_feeder(group)
    os.kill(feeder, signal.SIGKILL)
    for error in group.answers():
        assert (error.kind, error.numbers["rank"], error.numbers["pid"]) == ("PeerGone", None, feeder)
        assert error.numbers["version"] == 2
        assert "the feeder" in error.text
        assert "died" in error.text
    assert [one.kind for one in group.try_all("take")] == ["PeerGone"] * 2, "and again"


def test_what_a_dead_feeder_has_published_is_read_first(assembled: Callable[..., Group]) -> None:
    group = assembled()
    group.make(params={"num_batches": 10**6}, num_slots=4)
    group.all("take")
    fill(group, 3)
    os.kill(one_feeder(group), signal.SIGKILL)
    counts = group.all("take_until_it_raises")
    assert counts[0] == counts[1] >= 3
    errors = group.try_all("take")
    assert {(one.kind, one.numbers["version"]) for one in errors} == {("PeerGone", counts[0] + 1)}


def test_a_feeder_killed_before_the_first_batch_is_gone_for_all(
    assembled: Callable[..., Group], tmp_path: Path
) -> None:
    group = assembled()
    group.make(source="waiting_for_ever", params={"after": 0, "trace": str(tmp_path / "trace")})
    group.begin_all("take")
    until_asleep(group)
    os.kill(one_feeder(group), signal.SIGKILL)
    assert [(one.kind, one.numbers["version"]) for one in group.answers()] == [("PeerGone", 0)] * 2


def test_a_terminated_feeder_leaves_and_says_so(assembled: Callable[..., Group], tmp_path: Path) -> None:
    group = assembled()
    trace = tmp_path / "trace"
    group.make(source="waiting_for_ever", params={"after": 1, "trace": str(trace)})
    group.all("take")
    group.begin_all("take")
    until_asleep(group)
    feeder = one_feeder(group)
    os.kill(feeder, signal.SIGTERM)
    for error in group.answers():
        assert error.kind == "PeerGone"
        assert "closed the feed before its end" in error.text
    await_end(feeder)
    assert trace.read_text() == "cleaned up", "the source's own clean-up ran"


def test_a_rank_that_writes_and_dies_is_named_once_its_batches_are_read(assembled: Callable[..., Group]) -> None:
    group = assembled(3)
    group.make(writer="iterator", params={"num_batches": 50})
    group.all("take")
    group.ranks[0].take(2)
    group.ranks[0].kill()
    for rank in group.ranks[1:]:
        assert len(rank.take(2)) == 2
        with pytest.raises(Raised) as caught:
            rank.take()
        assert (caught.value.kind, caught.value.numbers["rank"], caught.value.numbers["version"]) == ("PeerGone", 0, 3)


# ---- a reader dies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dying", [0, 1])
def test_a_dead_rank_is_gone_for_all_others_and_the_feeder_ends(assembled: Callable[..., Group], dying: int) -> None:
    group = assembled(3)
    group.make(params={"num_batches": 10**6}, num_slots=2)
    group.all("take")
    feeder = one_feeder(group)
    group.ranks[dying].kill()
    others = [rank for rank in group.ranks if rank is not group.ranks[dying]]
    for rank in others:
        rank.begin_call("take", 10)
    for rank in others:
        with pytest.raises(Raised) as caught:
            rank.answer()
        assert (caught.value.kind, caught.value.numbers["rank"]) == ("PeerGone", dying)
        assert caught.value.numbers["pid"] == group.ranks[dying].pid
    await_end(feeder)


@pytest.mark.parametrize("has_left", [False, True])
def test_a_rank_is_named_when_it_takes_with_it_the_feeder_that_it_started(
    assembled: Callable[..., Group], tmp_path: Path, has_left: bool
) -> None:
    """Nobody looks before both are gone, and the feeder is inside its source. A rank that left stops nobody."""
    group = assembled(3)
    group.make(source="waiting_for_ever", params={"after": 2, "trace": str(tmp_path / "trace")})
    group.all("take")
    fill(group, 1)
    feeder, starter = one_feeder(group), group.ranks.pop(0)
    said = f"rank 0 (pid {starter.pid}) died while batch 1 was needed"
    if has_left:
        said = f"the feeder (pid {feeder}) died (rank 0 (pid {starter.pid}) ended too) while batch 2 was needed"
    else:
        starter.kill()
    starter.process.communicate("")  # no more calls: the script is over
    await_end(feeder)
    for rank in group.ranks:
        with pytest.raises(Raised, match=re.escape(f"PeerGone: {said}")):
            rank.take(2)


def test_a_rank_that_writes_misses_a_dead_reader(assembled: Callable[..., Group]) -> None:
    group = assembled(2)
    group.make(writer="iterator", params={"num_batches": 50}, num_slots=2)
    group.all("take")
    group.ranks[1].kill()
    with pytest.raises(Raised) as caught:
        group.ranks[0].take(10)
    assert (caught.value.kind, caught.value.numbers["rank"]) == ("PeerGone", 1)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_rank_that_dies_before_anybody_asked_for_a_batch_is_missed(
    assembled: Callable[..., Group], writer: str
) -> None:
    group = assembled(3)
    group.make(writer=writer)
    group.ranks[1].kill()
    for rank in (group.ranks[0], group.ranks[2]):
        rank.begin_call("take")
    for rank in (group.ranks[0], group.ranks[2]):
        with pytest.raises(Raised) as caught:
            rank.answer()
        assert (caught.value.kind, caught.value.numbers["rank"]) == ("PeerGone", 1)


def test_a_rank_that_dies_while_the_source_prepares_its_first_batch_is_missed(
    assembled: Callable[..., Group], tmp_path: Path
) -> None:
    group = assembled(3)
    group.make(source="waiting_for_ever", params={"after": 0, "trace": str(tmp_path / "trace")})
    group.begin_all("take")
    until_asleep(group)
    group.ranks[2].kill()
    assert [one.numbers["rank"] for one in group.answers()[:2]] == [2, 2]


def test_all_killed_at_once_leave_no_feeder(assembled: Callable[..., Group]) -> None:
    group = assembled(3)
    group.make(params={"num_batches": 10**6})
    group.all("take")
    feeder = one_feeder(group)
    for rank in group.ranks:
        rank.kill()
    await_end(feeder)


# ---- leaving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_taken", [0, 2])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_process_that_ends_without_closing_has_left(
    assembled: Callable[..., Group], writer: str, num_taken: int
) -> None:
    """It takes its last batch, the script is over: nobody else is disturbed. Before the first batch it is missed."""
    group = assembled(3)
    group.make(writer=writer, params={"num_batches": 20}, num_slots=2)
    if num_taken:
        group.all("take", num_taken)
    leaver = group.ranks.pop()
    _, errors = leaver.process.communicate("")  # no more calls: the script is over
    assert (leaver.process.returncode, errors) == (0, "")
    if num_taken:
        assert [len(batches) for batches in group.all("take_all")] == [18, 18]
    else:
        for error in group.try_all("take_all"):
            assert (error.kind, error.numbers["rank"], error.numbers["version"]) == ("PeerGone", 2, 0)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("num_taken", [0, 1])
def test_closing_from_another_thread_ends_a_wait(standing: Party, tmp_path: Path, writer: str, num_taken: int) -> None:
    params = {"after": 1, "trace": str(tmp_path / "trace")}
    if writer == "feeder":
        standing.make(source="waiting_for_ever", params=params)
    else:
        standing.make(writer=writer, num_slots=2, params={"num_batches": 50})
    if num_taken:
        standing.take(1)
    # Of an iterator's ranks the first waits for a slot, or for the others' first question; nobody waits with it.
    waiting = standing.group.ranks if writer == "feeder" else standing.group.ranks[:1]
    for rank in waiting:
        rank.begin_call("take_while_closing")
    for rank in waiting:
        assert rank.answer().startswith("FeedClosed: ")
    standing.names.clear()
    for rank in standing.group.ranks[len(waiting) :]:
        rank.close()


def test_a_forked_child_is_told_that_the_feed_is_not_its_own(standing: Party) -> None:
    standing.make(writer="iterator")
    for num_taken in (0, 1):
        if num_taken:
            standing.take(1)
        for answers in standing.group.all("fork_and_use"):
            assert "a forked child cannot use it" in answers[0]
            assert answers[1] == "nothing"
    standing.names.clear()
    assert [len(batches) for batches in standing.take_all()] == [4, 4, 4]
    standing.group.all("close")


def test_a_feeder_survives_its_ranks_forked_children(standing: Party) -> None:
    standing.make()
    standing.take(1)
    standing.group.all("fork_and_use")
    assert [len(batches) for batches in standing.take_all()] == [4, 4, 4]


# ---- slow, stopped, interrupted --------------------------------------------------------------------------------------


def test_a_stopped_feeder_is_slow_and_never_dead(standing: Party) -> None:
    standing.make(params={"num_batches": 6}, timeout_s=SHORT_S, stall_warning_s=SHORT_S / 4, num_slots=2)
    standing.take(1)
    feeder = one_feeder(standing.group)
    os.kill(feeder, signal.SIGSTOP)
    try:
        num_taken = 1 + standing.group.all("take_until_it_raises")[0]
        for error in standing.errors("take"):
            assert error.kind == "FeedTimeout"
            assert f"the feeder (pid {feeder}, stopped by a signal)" in error.text
            assert "all processes are alive" in error.text
    finally:
        os.kill(feeder, signal.SIGCONT)
    rests = [batches[num_taken:] for batches in standing.expected("numbers", num_batches=6)]
    assert standing.take_all() == rests, "nothing is lost"
    stalls = [message for message in standing.group.ranks[0].messages() if message.startswith("stalled for")]
    assert stalls
    assert "from the feeder" in stalls[-1]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_rank_that_lags_is_named_and_no_batch_is_lost(standing: Party, writer: str) -> None:
    standing.make(writer=writer, num_slots=2, timeout_s=SHORT_S, params={"num_batches": 6})
    standing.take(1)
    first, lagging, last = standing.group.ranks
    for rank in (first, last):
        rank.begin_call("take_until_it_raises")
    assert first.answer() == last.answer()
    with pytest.raises(Raised) as caught:
        first.take()
    assert caught.value.kind == "FeedTimeout"
    assert f"rank 1 (pid {lagging.pid}, " in caught.value.text
    for rank in standing.group.ranks:
        rank.begin_call("take_all")
    rests = [rank.answer() for rank in standing.group.ranks]
    expected = standing.expected("numbers", num_batches=6)[0]
    assert rests[1] == expected[1:]
    assert all(rest == expected[-len(rest) :] for rest in rests if rest)
    assert len(rests[0]) == len(rests[2]) < 5


@pytest.mark.parametrize("writer", WRITERS)
def test_a_rank_that_never_asks_for_its_first_batch_is_named(standing: Party, writer: str) -> None:
    standing.make(writer=writer, timeout_s=SHORT_S)
    *waiting, absent = standing.group.ranks
    for rank in waiting:
        rank.begin_call("take")
    for rank in waiting:
        with pytest.raises(Raised) as caught:
            rank.answer()
        assert caught.value.kind == "FeedTimeout"
        assert f"rank 2 (pid {absent.pid}, sleeping) to ask for its first batch" in caught.value.text


def test_a_feed_may_lie_idle_for_longer_than_any_wait(standing: Party) -> None:
    """A feed for validation is made at the start, and the one for training rests while it is used."""
    standing.make(timeout_s=SHORT_S, num_slots=2)
    time.sleep(1.5 * SHORT_S)  # nothing happens, which is the point
    standing.take(1)
    time.sleep(1.5 * SHORT_S)
    assert [len(batches) for batches in standing.take_all()] == [4, 4, 4]


def test_ctrl_c_ends_a_wait_on_every_rank_and_the_feeder_with_the_last(standing: Party, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    standing.make(source="waiting_for_ever", params={"after": 1, "trace": str(trace)})
    standing.take(1)
    standing.group.begin_all("take")
    until_asleep(standing.group)
    feeder = one_feeder(standing.group)
    for pid in (feeder, *(rank.pid for rank in standing.group.ranks)):
        os.kill(pid, signal.SIGINT)
    assert [one.kind for one in standing.group.answers()] == ["KeyboardInterrupt"] * 3
    assert one_feeder(standing.group) == feeder, "it ends with its ranks, not before"
    standing.close()
    await_end(feeder)
    assert trace.read_text() == "cleaned up"


def test_ctrl_c_before_the_first_batch_leaves_the_group(standing: Party, tmp_path: Path) -> None:
    standing.make(source="waiting_for_ever", params={"after": 0, "trace": str(tmp_path / "trace")})
    standing.group.begin_all("take")
    until_asleep(standing.group)
    feeder = one_feeder(standing.group)
    for rank in standing.group.ranks:
        os.kill(rank.pid, signal.SIGINT)
    assert [one.kind for one in standing.group.answers()] == ["KeyboardInterrupt"] * 3
    assert "interrupted while it waited for its first batch" in standing.errors("take")[0].text
    await_end(feeder)


# ---- a process that gets no more memory, threads that share a feed ---------------------------------------------------


@pytest.mark.parametrize(("writer", "num_mapped"), [("feeder", 0), ("iterator", 0), ("iterator", 1)])
def test_a_writer_that_cannot_map_larger_slots_says_so_on_every_rank(
    standing: Party, writer: str, num_mapped: int
) -> None:
    """A rank that writes maps them twice: as writer, and as reader."""
    slots_bytes = 4 * (4 << 20)
    params = {"num_bytes": 4 << 20, "spare_bytes": num_mapped * slots_bytes + slots_bytes // 2}
    standing.make(writer=writer, source="large_without_address_space", params=params)
    standing.take(3)
    error = standing.error("take")
    assert error.kind == "ConfigError"
    assert "cannot map" in error.text
    assert "RLIMIT_AS" in error.text


@pytest.mark.parametrize("writer", WRITERS)
def test_threads_that_come_beside_the_first_are_refused_and_it_goes_on(
    standing: Party, tmp_path: Path, writer: str
) -> None:
    gate = str(tmp_path / "gate")
    standing.make(writer=writer, source="gated", params={"gate": gate, "num_ranks": 3})
    for index, rank in enumerate(standing.group.ranks):
        rank.begin_call("take_in_threads", f"{gate}{index}")
    for answer in standing.group.answers():
        assert answer["first"] == [0]
        assert all(one.startswith("RuntimeError: another thread of this process") for one in answer["refused"]), answer
    assert [len(batches) for batches in standing.take_all()] == [4, 4, 4]
