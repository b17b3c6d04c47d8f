"""Recorded runs as jobs, and two of them side by side."""

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headrace.measure.compare import compare_runs
from headrace.measure.job import join_ranks, scaling_point
from headrace.measure.memory import DeviceMemory, HostMemory, MemoryUse
from headrace.measure.phases import PHASES
from headrace.measure.record import RankRecords, RunFacts, StepRecord, WindowRecord

FACTS = RunFacts(run="a", rank=0, world_size=1, sequence_length=128, num_nodes=1, device_name="cpu", dtype="float32")


def steps(facts, *, step_ms=100.0, noise=0.02, num=60, seed=0, tokens=1000, samples=8, data_ms=10.0, **changes):
    """A run's steps with noise; `data` takes `data_ms` of each."""
    random_ = random.Random(seed)
    for index in range(num):
        whole = round(step_ms * 1e6 * random_.gauss(1.0, noise))
        data = round(data_ms * 1e6)
        phases = dict.fromkeys(PHASES) | {"data": data, "forward": (whole - data) // 2}
        phases["other"] = whole - data - (whole - data) // 2
        fields = {"step_ns": whole, "phases_ns": phases, "tokens": tokens, "samples": samples} | changes
        yield StepRecord(run=facts.run, rank=facts.rank, step=index, warmup=index < facts.warmup_steps, **fields)


def rank_of(facts=FACTS, windows=(), truncated=False, **options):
    return RankRecords(
        path=Path(f"rank{facts.rank}.jsonl"), facts=facts, steps=tuple(steps(facts, **options)), windows=tuple(windows),
        truncated=truncated,
    )  # fmt: skip


def job(run="a", **options):
    facts = msgspec.structs.replace(FACTS, run=run, **options.pop("facts", {}))
    return join_ranks([rank_of(facts, **options)])


def metric(comparison, name):
    return next(one for one in comparison.metrics if one.name == name)


def test_a_faster_run_is_better_a_slower_one_worse_and_the_same_cannot_be_told():
    base = job("a", seed=1)
    faster, slower, same = job("b", step_ms=90, seed=2), job("c", step_ms=110, seed=3), job("d", seed=4)
    assert compare_runs(base, faster).verdict == "better"
    assert compare_runs(base, slower).verdict == "worse"
    assert compare_runs(base, same).verdict == "cannot tell"
    got = metric(compare_runs(base, faster), "step time")
    assert got.ratio.estimate == pytest.approx(0.9, rel=0.015)
    assert got.ratio.low < got.ratio.estimate < got.ratio.high < 0.92
    assert compare_runs(base, faster).decided_by == "tokens/s"


def test_a_certain_difference_that_is_too_small_to_matter_is_no_verdict():
    base, faster = job("a", noise=0.0001), job("b", noise=0.0001, step_ms=99.5)
    assert compare_runs(base, faster).verdict == "cannot tell"
    assert compare_runs(base, faster, smallest_effect=0.001).verdict == "better"


def test_too_few_steps_are_no_verdict_with_the_reason():
    got = compare_runs(job("a", num=5), job("b", num=5, step_ms=50))
    assert got.verdict == "cannot tell"
    assert "5 blocks" in metric(got, "tokens/s").reason


def test_warm_up_does_not_count():
    facts = {"warmup_steps": 5}
    slow_start = [*list(steps(msgspec.structs.replace(FACTS, run="b", **facts), step_ms=9000))[:5]]
    base = job("a", facts=facts)
    rank = rank_of(msgspec.structs.replace(FACTS, run="b", **facts))
    other = join_ranks([replace(rank, steps=(*slow_start, *rank.steps[5:]))])
    assert compare_runs(base, other).verdict == "cannot tell"
    assert other.summary().mean_step_s == pytest.approx(0.1, rel=0.02)


def test_what_one_run_did_not_measure_is_said_not_compared():
    got = compare_runs(job("a"), job("b", tokens=None))
    assert metric(got, "tokens/s").reason == "not measured in B"
    assert metric(got, "backward").verdict == "cannot tell"
    assert got.decided_by == "samples/s"
    nothing = compare_runs(job("a", num=0), job("b", num=0))
    assert nothing.verdict == "cannot tell"


def test_phases_are_compared_each_by_itself():
    got = compare_runs(job("a", data_ms=20), job("b", data_ms=5))
    assert metric(got, "data").verdict == "better"
    assert metric(got, "data").ratio.estimate == pytest.approx(0.25)
    zero = compare_runs(job("a", data_ms=0), job("b", data_ms=5))
    assert "no ratio" in metric(zero, "data").reason


def test_what_ran_differently_is_listed():
    got = compare_runs(job("a"), job("b", facts={"dtype": "bfloat16", "label": "new feed"}))
    assert set(got.differences) == {"dtype: float32 and bfloat16", "label: None and new feed"}


def test_runs_of_different_size_get_linearity():
    small = job("a", seed=1)
    large = job("b", seed=2, step_ms=110, facts={"world_size": 8, "data_parallel_size": 8})
    got = compare_runs(small, large).linearity
    assert got.kind == "card -> node"
    assert got.value == pytest.approx(100 / 110, rel=0.02)
    assert got.differences == ()
    assert compare_runs(large, small).linearity == got
    assert compare_runs(small, large).strong_scaling is None


def test_the_same_global_batch_on_more_devices_is_strong_scaling():
    small = job("a", samples=64, tokens=8000)
    large = job("b", samples=8, tokens=1000, step_ms=16, data_ms=1, facts={"world_size": 8, "data_parallel_size": 8})
    got = compare_runs(small, large)
    assert got.strong_scaling.speedup == pytest.approx(100 / 16, rel=0.02)
    assert any("samples per data-parallel rank" in text for text in got.linearity.differences)


TP2_DP2 = {"world_size": 4, "data_parallel_size": 2, "tensor_parallel_size": 2}


def ranks_of_a_job(present=(0, 1, 2, 3), **options):
    """TP=2 x DP=2: ranks 0 and 1 share data 0, ranks 2 and 3 data 1."""
    return [
        rank_of(msgspec.structs.replace(FACTS, rank=rank, data_rank=rank // 2, **TP2_DP2), seed=rank, **options)
        for rank in present
    ]


def test_ranks_that_share_their_data_count_its_samples_once():
    got = join_ranks(ranks_of_a_job())
    assert all(step.tokens == 2000 for step in got.steps)
    assert got.summary().throughput.tokens_per_s == pytest.approx(2000 / 0.1, rel=0.02)
    assert got.notes == ()
    for step in got.steps:
        assert sum(value for value in step.phases_ns.values() if value is not None) == step.step_ns


def test_missing_ranks_are_said_and_counts_scaled():
    got = join_ranks(ranks_of_a_job(present=(0, 1)))
    assert all(step.tokens == 2000 for step in got.steps)
    assert "2 of 4 ranks were recorded" in got.notes
    assert any("counts scaled" in note for note in got.notes)


def test_a_rank_that_died_early_shortens_the_common_part_and_says_so():
    ranks = ranks_of_a_job()
    ranks[3] = replace(ranks[3], steps=ranks[3].steps[:40], truncated=True)
    got = join_ranks(ranks)
    assert len(got.steps) == 40
    assert "20 steps are not recorded by every rank and are left out" in got.notes
    assert "rank3.jsonl ends in the middle of a line" in got.notes


def test_a_phase_one_rank_did_not_see_is_unseen_for_the_job():
    ranks = ranks_of_a_job()
    blind = [msgspec.structs.replace(step, phases_ns=step.phases_ns | {"forward": None}) for step in ranks[1].steps]
    ranks[1] = replace(ranks[1], steps=tuple(blind))
    summary = join_ranks(ranks).summary()
    assert summary.phases["forward"].mean_s is None
    assert summary.phases["data"].mean_s == pytest.approx(0.010)


def test_peaks_are_the_largest_over_ranks_and_windows():
    def use(gib):
        device = DeviceMemory(
            peak_allocated_bytes=gib, peak_reserved_bytes=2 * gib, peak_active_bytes=None, alloc_retries=None,
            out_of_memory_errors=None, capacity_bytes=None,
        )  # fmt: skip
        return MemoryUse(device=device, host=HostMemory(rss_bytes=gib, peak_rss_bytes=3 * gib, pss_bytes=None))

    windows = [WindowRecord(run="a", rank=0, step=index, memory=use(gib)) for index, gib in enumerate((5, 9, 7))]
    got = join_ranks([rank_of(windows=windows)])
    assert (got.peak_allocated_bytes, got.peak_reserved_bytes, got.peak_rss_bytes) == (9, 18, 27)


def test_the_host_share_is_the_time_outside_phases_where_the_host_computes():
    point = scaling_point(job(noise=0.0))
    assert point.data_share == pytest.approx(0.1)
    assert point.host_share == pytest.approx(0.45, abs=0.01)
    assert point.samples_per_data_rank == 8
