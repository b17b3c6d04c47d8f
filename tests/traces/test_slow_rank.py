"""Verdicts on imagined jobs: each class, and above all `none`; nothing changes with the clocks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.traces import judge, to_document
from headrace.traces.timeline import PeerWait, RankTrace

from .jobs import MS, lanes, synchronous_job

STEPS = range(2, 10)


def verdict(traces):
    return judge(traces).slow_rank


def noisy(rank, step, spread=2 * MS):
    return 60 * MS + random.Random(f"{rank} {step}").randrange(spread)


def test_a_healthy_job_has_no_slow_rank():
    found = verdict(synchronous_job(4, STEPS, noisy))
    assert (found.verdict, found.rank, found.sure) == ("none", None, "high")
    assert found.disproved_by


def test_a_rank_that_computes_longer_in_every_step_is_a_slow_card():
    found = verdict(synchronous_job(4, STEPS, lambda rank, step: noisy(rank, step) + 40 * MS * (rank == 2)))
    assert (found.verdict, found.rank, found.traced, found.sure) == ("card", 2, True, "high")
    assert (found.steps_late, found.num_steps) == (8, 8)
    assert found.lateness_ns == pytest.approx(40 * MS, rel=0.1)
    assert "in 8 of 8 steps" in found.what


def test_a_rank_whose_device_idles_longer_has_a_slow_host():
    job = synchronous_job(4, STEPS, noisy, idle_ns=lambda rank, step: 30 * MS * (rank == 1))
    found = verdict(job)
    assert (found.verdict, found.rank) == ("host", 1)
    assert "idle" in found.what


def test_a_rank_that_waits_for_its_data_is_told_as_such():
    job = list(synchronous_job(4, STEPS, noisy, idle_ns=lambda rank, step: 30 * MS * (rank == 1)))
    job[1] = replace(job[1], lanes=tuple(replace(own, data_ns=30 * MS, host_launch_ns=0) for own in job[1].lanes))
    found = verdict(job)
    assert (found.verdict, found.rank) == ("host", 1)
    assert "data" in found.what


def test_all_ranks_of_one_host_late_is_the_host():
    job = synchronous_job(
        8,
        STEPS,
        lambda rank, step: noisy(rank, step) + 40 * MS * (rank in (4, 5)),
        host=lambda rank: f"node{rank // 2}",
    )
    found = verdict(job)
    assert found.verdict == "host"
    assert {found.rank, *found.also_late} == {4, 5}
    assert "node2" in found.what


def test_two_slow_ranks_are_both_named():
    found = verdict(synchronous_job(6, STEPS, lambda rank, step: noisy(rank, step) + 40 * MS * (rank in (1, 4))))
    assert found.verdict == "card"
    assert {found.rank, *found.also_late} == {1, 4}


def test_a_rank_late_in_a_few_steps_only_is_not_accused():
    found = verdict(
        synchronous_job(4, STEPS, lambda rank, step: noisy(rank, step) + 40 * MS * (rank == 2 and step < 5))
    )
    assert found.verdict == "none"


def test_a_small_delay_in_every_step_is_not_accused():
    found = verdict(synchronous_job(4, STEPS, lambda rank, step: 60 * MS + 2 * MS * (rank == 2)))
    assert found.verdict == "none"


def test_lateness_that_wanders_with_the_work_is_the_data():
    found = verdict(synchronous_job(4, STEPS, lambda rank, step: 60 * MS + 40 * MS * (rank == (step * 7) % 4)))
    assert (found.verdict, found.rank) == ("data", None)
    assert len(found.evidence["last_by_step"]) == 8


def test_a_stage_that_computes_longer_is_the_partition():
    job = synchronous_job(
        4, STEPS, lambda rank, step: noisy(rank, step) + 30 * MS * (rank >= 2), stage=lambda rank: rank // 2
    )
    found = verdict(job)
    assert (found.verdict, found.rank) == ("partition", None)
    assert "stage 1" in found.what


def test_a_slow_rank_inside_a_slow_stage_is_still_found():
    job = synchronous_job(
        6,
        STEPS,
        lambda rank, step: noisy(rank, step) + 30 * MS * (rank >= 3) + 40 * MS * (rank == 4),
        stage=lambda rank: rank // 3,
    )
    assert (verdict(job).verdict, verdict(job).rank) == ("card", 4)


def test_one_rank_or_half_a_group_decides_nothing():
    job = synchronous_job(4, STEPS, lambda rank, step: 60 * MS + 40 * MS * (rank == 2))
    for traced in (job[:1], job[1:3]):
        found = verdict(traced)
        assert (found.verdict, found.rank, found.traced) == ("undecidable", None, None)
        assert found.what


def test_one_step_names_only_a_large_delay_and_calls_it_unsure():
    large = verdict(synchronous_job(4, [50], lambda rank, step: 60 * MS + 40 * MS * (rank == 3)))
    assert (large.verdict, large.rank, large.sure) == ("card", 3, "low")
    assert "only step" in large.what
    assert verdict(synchronous_job(4, [50], lambda rank, step: 60 * MS + 4 * MS * (rank == 3))).verdict == "none"


def test_a_first_step_that_holds_the_profilers_start_is_left_out():
    # nsys-ai PR#227
    job = synchronous_job(4, STEPS, lambda rank, step: noisy(rank, step) + 900 * MS * (rank == 0 and step == 2))
    found = verdict(job)
    assert found.verdict == "none"
    assert found.evidence["steps_left_out"] == [2]


def test_noise_with_two_ranks_is_a_coin_not_a_fault():
    """Six of eight steps by 10 ms and more: with two ranks that happens to one of them in 29 % of all runs."""
    late_ms = [12, 25, 10, -20, 31, 14, -11, 18]

    def late(rank, step):
        return max(0, late_ms[step] if rank == 0 else -late_ms[step]) * MS

    found = verdict(synchronous_job(2, range(8), lambda rank, step: 60 * MS, idle_ns=late))
    assert (found.verdict, found.rank) == ("none", None)
    assert found.evidence["lateness_us_per_step"]["0"] == pytest.approx(9875, rel=0.01)


def test_a_delay_as_large_but_steady_is_a_fault():
    job = synchronous_job(2, range(8), lambda rank, step: 60 * MS + 10 * MS * (rank == 0))
    assert (verdict(job).verdict, verdict(job).rank) == ("card", 0)


def on_cpu(job):
    return [replace(trace, device="cpu") for trace in job]


TAKEN_MS = [50, 0, 35, 5, 60, 10, 0, 45]
"""What other processes take of a core in eight steps."""


def busy_cores(rank, step):
    """Operators of two ranks that share their cores with other processes: both lose as much, in different steps."""
    return (100 + TAKEN_MS[step if rank else -1 - step]) * MS


def test_a_cpu_rank_that_computes_longer_by_as_much_in_every_step_is_told_without_a_card_to_swap():
    found = verdict(on_cpu(synchronous_job(4, STEPS, lambda rank, step: noisy(rank, step) + 40 * MS * (rank == 2))))
    assert (found.verdict, found.rank, found.sure) == ("card", 2, "high")
    assert "a slower core, or more work" in found.what
    assert "card" not in found.what + found.disproved_by


def test_a_cpu_rank_whose_operators_take_longer_now_and_then_has_a_busy_host():
    late_ms = [90, 30, 150, 60, 200, 40, 120, 70]
    job = synchronous_job(2, range(8), lambda rank, step: 60 * MS + late_ms[step] * MS * (rank == 1))
    found = verdict(on_cpu(job))
    assert (found.verdict, found.rank, found.sure) == ("host", 1, "low")
    assert "other processes on its cores" in found.what
    assert "comes and goes" in found.what
    assert "pin each rank to cores of its own" in found.disproved_by
    # With cards it is the card, but not for sure either.
    assert (verdict(job).verdict, verdict(job).sure) == ("card", "low")


@pytest.mark.parametrize(("taken_ms", "sure"), [(4, "high"), (25, "medium"), (60, "low")])
def test_the_more_a_delay_scatters_the_less_sure_it_is(taken_ms, sure):
    job = synchronous_job(2, range(8), lambda rank, step: 60 * MS + (60 + (-1) ** step * taken_ms) * MS * (rank == 1))
    assert (verdict(job).rank, verdict(job).sure) == (1 if taken_ms < 60 else None, sure)


def test_a_cpu_rank_whose_thread_has_a_gap_has_a_slow_host():
    job = on_cpu(synchronous_job(2, STEPS, noisy, idle_ns=lambda rank, step: 30 * MS * (rank == 0)))
    found = verdict(job)
    assert (found.verdict, found.rank, found.sure) == ("host", 0, "high")
    assert "runs no operator for 30.0 ms longer" in found.what


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("offset_us", [0, 79, 10**9])
def test_a_gap_on_the_host_is_seen_among_operators_that_busy_cores_slow_down_at_random(slow, offset_us):
    """A sleep of 25 ms per step beside operators that take 100 to 160 ms: the waits alone convict nobody."""
    job = on_cpu(
        synchronous_job(
            2,
            range(8),
            busy_cores,
            idle_ns=lambda rank, step: 20 * MS + 25 * MS * (rank == slow),
            offset_ns=lambda rank: offset_us * 1000 * rank,
        )
    )
    found = verdict(job)
    assert (found.verdict, found.rank, found.sure) == ("host", slow, "medium")
    assert found.lateness_ns == pytest.approx(25 * MS)
    assert found.evidence["rule"] == "host gap, beside waits"
    assert "too unevenly to convict it by that alone" in found.what


def test_busy_cores_alone_convict_nobody_and_nobody_is_called_healthy():
    found = verdict(on_cpu(synchronous_job(2, range(8), busy_cores, idle_ns=lambda rank, step: 20 * MS)))
    assert (found.rank, found.sure) == (None, "low")
    job = synchronous_job(2, range(8), lambda rank, step: 60 * MS, idle_ns=busy_cores)
    assert (verdict(job).verdict, verdict(job).sure) == ("none", "low")
    assert "would not show among that; trace more steps" in verdict(job).what


def test_a_rank_that_idles_because_it_has_less_to_compute_is_not_accused():
    job = synchronous_job(
        4,
        STEPS,
        lambda rank, step: noisy(rank, step) - 20 * MS * (rank == 1),
        idle_ns=lambda rank, step: 20 * MS * (rank == 1),
    )
    assert verdict(job).verdict == "none"


def test_wandering_lateness_is_not_surely_the_data_where_the_cores_may_have_been_taken():
    job = on_cpu(synchronous_job(4, STEPS, lambda rank, step: 60 * MS + 40 * MS * (rank == (step * 7) % 4)))
    found = verdict(job)
    assert (found.verdict, found.sure) == ("data", "low")
    assert "or other processes take the ranks' cores" in found.what


def test_a_steady_delay_below_the_limit_is_no_verdict_but_is_said():
    found = verdict(synchronous_job(4, STEPS, lambda rank, step: 60 * MS + 2 * MS * (rank == 2)))
    assert (found.verdict, found.sure) == ("none", "high")
    assert "Rank 2 comes last by 2.0 ms per step (2.9%)" in found.what


OFFSETS_US = [79, 10**9, -(10**9)]


@pytest.mark.parametrize("offset_us", OFFSETS_US)
@pytest.mark.parametrize("slow", [None, 2])
@pytest.mark.parametrize("numbered", [True, False])
def test_verdicts_do_not_change_under_clock_offsets(offset_us, slow, numbered):
    def document(shift_ns):
        job = synchronous_job(
            4,
            STEPS,
            lambda rank, step: noisy(rank, step) + 40 * MS * (rank == slow),
            offset_ns=lambda rank: shift_ns * (rank == 1),
            numbered=numbered,
        )
        return to_document(judge(job))

    here, there = document(0), document(offset_us * 1000)
    assert here["slow_rank"]["rank"] == slow
    assert there["clock_offsets"][1]["offset_us"] == offset_us
    for key in ("slow_rank", "slow_link", "waits", "breakdown", "unmatched_collectives"):
        assert here[key] == there[key]


@settings(max_examples=25)
@given(
    slow=st.one_of(st.none(), st.integers(0, 3)),
    offsets=st.lists(st.integers(-(10**18), 10**18), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_the_planted_rank_is_found_under_any_clocks(slow, offsets, seed):
    job = synchronous_job(
        4,
        range(6),
        lambda rank, step: noisy(rank, (step, seed)) + 30 * MS * (rank == slow),
        offset_ns=lambda rank: offsets[rank],
    )
    found = verdict(job)
    assert found.rank == slow
    assert found.verdict == ("none" if slow is None else "card")


def test_peers_name_a_rank_nobody_traced():
    traces = [
        RankTrace(
            rank=rank,
            source="t",
            format="ascend_db",
            lanes=tuple(lanes(step) for step in range(3)),
            peer_waits=tuple(
                PeerWait(step=step, operation=f"op{step}", peer=peer, wait_ns=wait * MS)
                for step in range(3)
                for peer, wait in ((6, 40), (7, 2))
            ),
        )
        for rank in (0, 1)
    ]
    found = verdict(traces)
    assert (found.verdict, found.rank, found.traced, found.steps_late) == ("card", 6, False, 3)
    assert "was not traced" in found.what


def test_hundreds_of_ranks_are_judged_alike():
    job = synchronous_job(300, range(6), lambda rank, step: noisy(rank, step) + 40 * MS * (rank == 217))
    found = verdict(job)
    assert (found.verdict, found.rank, found.also_late) == ("card", 217, ())
