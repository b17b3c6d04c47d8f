"""Recorded runs as jobs, and two of them side by side."""

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headrace.measure.compare import compare_runs
from headrace.measure.flops import ModelShape
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


def run_of(times_ms, run="a", tokens=512, samples=16, facts=FACTS):
    """A run whose steps took exactly these times."""
    facts = msgspec.structs.replace(facts, run=run)
    made = [
        StepRecord(run=run, rank=0, step=index, step_ns=round(ms * 1e6), phases_ns={}, tokens=tokens, samples=samples)
        for index, ms in enumerate(times_ms)
    ]
    rank = RankRecords(path=Path("rank0.jsonl"), facts=facts, steps=tuple(made), windows=(), truncated=False)
    return join_ranks([rank])


def noisy(seed, num=57, ms=10.0, noise=0.4):
    """Independent step times with the heavy right tail of a shared machine."""
    random_ = random.Random(seed)
    return [ms * random_.lognormvariate(0.0, noise) for _ in range(num)]


@pytest.mark.parametrize("seed", range(8))
def test_tokens_samples_and_step_time_are_one_measurement_seen_three_ways(seed):
    """512 tokens in every step: value, ratio, interval and verdict of the rates are those of the time, turned over."""
    a, b = run_of(noisy(seed)), run_of(noisy(seed + 100, ms=8.0), "b")
    got = compare_runs(a, b)
    tokens, samples, time = (metric(got, name) for name in ("tokens/s", "samples/s", "step time"))
    for one, job_ in ((tokens.a, a), (tokens.b, b)):
        assert one == pytest.approx(job_.summary().throughput.tokens_per_s, rel=1e-12)
    assert (tokens.a * time.a, tokens.b * time.b) == (pytest.approx(512), pytest.approx(512))
    assert tokens.ratio.estimate == pytest.approx(tokens.b / tokens.a, rel=1e-12)
    assert time.ratio.estimate == pytest.approx(1 / tokens.ratio.estimate, rel=1e-12)
    if tokens.ratio.low is not None:
        assert time.ratio.low == pytest.approx(1 / tokens.ratio.high, rel=1e-9)
        assert time.ratio.high == pytest.approx(1 / tokens.ratio.low, rel=1e-9)
        assert tokens.ratio.low < tokens.ratio.estimate < tokens.ratio.high
    assert tokens.verdict == samples.verdict == time.verdict == got.verdict
    assert tokens.reason == time.reason


def test_the_edge_of_what_matters_is_the_same_for_a_time_and_its_rate():
    """1.0100x the rate is 0.9900y the time: with two edges one would be a verdict and the other none."""
    got = compare_runs(run_of([10.1001] * 40), run_of([10.0] * 40, "b"))
    assert metric(got, "tokens/s").verdict == metric(got, "step time").verdict == "better"


def geometric(first, last, num):
    return [first * (last / first) ** (index / (num - 1)) for index in range(num)]


@pytest.mark.parametrize(
    "drift",
    [
        geometric(20.0, 4.0, 57),
        [ms * one / 10.0 for ms, one in zip(geometric(20.0, 4.0, 57), noisy(3, noise=0.15), strict=True)],
        [10.0 + 0.02 * index for index in range(57)],
        [20.0] * 28 + [4.0] * 29,
        geometric(20.0, 4.0, 12),
    ],
    ids=["20 to 4 ms", "20 to 4 ms with noise", "12 % in all", "two levels", "few steps"],
)
def test_a_run_that_drifts_throughout_gets_no_verdict_and_the_reason(drift):
    steady = run_of(noisy(2, num=len(drift), ms=30.0, noise=0.02))
    for got, run in ((compare_runs(steady, run_of(drift, "b")), "B"), (compare_runs(run_of(drift), steady), "A")):
        for name in ("tokens/s", "samples/s", "step time"):
            one = metric(got, name)
            assert one.verdict == "cannot tell"
            assert one.reason.startswith(f"run {run} drifts")
            assert (one.ratio.low, one.ratio.high) == (None, None)
            assert one.ratio.estimate == pytest.approx(one.b / one.a)
    both = compare_runs(run_of(drift), run_of(drift, "b"))
    assert metric(both, "step time").reason.startswith("both runs drift")


def test_a_drift_too_small_to_matter_does_not_take_the_verdict():
    slowly = [10.0 + 0.0001 * index for index in range(57)]
    assert compare_runs(run_of([12.0] * 57), run_of(slowly, "b")).verdict == "better"


def test_steady_runs_are_seldom_said_to_drift():
    """Two steady runs of 57 independent steps each: 1 % of trends by chance each, and a little for alike blocks."""
    pairs = [compare_runs(run_of(noisy(seed)), run_of(noisy(seed + 500), "b")) for seed in range(60)]
    drifting = sum("drifts" in (metric(one, "step time").reason or "") for one in pairs)
    assert drifting <= 6
    assert sum(one.verdict != "cannot tell" for one in pairs) <= 6


SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, gated=False, vocab=256)


def test_another_model_and_another_batch_are_said_and_not_taken_for_the_same_work():
    small = msgspec.structs.replace(FACTS, model="Llama", num_parameters=1000, shape=SHAPE)
    large = msgspec.structs.replace(small, num_parameters=2000, shape=replace(SHAPE, layers=4, hidden=128))
    a, b = run_of([10.0] * 20, facts=small), run_of([30.0] * 20, "b", tokens=1024, samples=32, facts=large)
    got = compare_runs(a, b)
    assert set(got.differences) == {
        "num parameters: 1000 and 2000", "model's layers: 2 and 4", "model's hidden: 64 and 128",
        "samples per step: 16 and 32", "tokens per step: 512 and 1,024",
    }  # fmt: skip
    assert not got.same_work
    assert compare_runs(a, run_of([30.0] * 20, "b", facts=small)).same_work


def test_a_larger_job_with_as_much_per_rank_is_the_same_work():
    four = msgspec.structs.replace(FACTS, world_size=4, data_parallel_size=4)
    weak, strong = run_of([10.0] * 20, "b", facts=four), run_of([10.0] * 20, "b", tokens=128, samples=4, facts=four)
    for large in (weak, strong):
        assert compare_runs(run_of([10.0] * 20), large).same_work
    assert not compare_runs(run_of([10.0] * 20), run_of([10.0] * 20, "b", samples=5, facts=four)).same_work


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
