"""Two recorded runs side by side: better, worse, or cannot tell.

The interval covers the noise inside the runs: consecutive steps are put into blocks, long enough that neighbouring
blocks do not resemble each other, and blocks are resampled. It does not cover what differs between two starts of the
same job (placement, temperature, neighbours): a difference of a few per cent between two single runs is worth repeating
before it is worth believing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headrace.measure.job import Job, scaling_point
from headrace.measure.linearity import Linearity, StrongScaling, compare_scaling, strong_scaling
from headrace.measure.phases import PHASES
from headrace.measure.record import RunFacts, StepRecord
from headrace.measure.statistics import (
    MIN_BLOCKS,
    RatioInterval,
    Verdict,
    neighbours_resemble,
    ratio_interval,
    verdict,
)

NUM_BLOCKS = (20, 14, 10, 8, MIN_BLOCKS)
"""Tried in this order: fewer blocks are longer, and less alike where a run drifts."""
COMPARED_FACTS = (
    "label", "world_size", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size",
    "context_parallel_size", "num_nodes", "device", "device_name", "dtype", "sequence_length", "attention", "recompute",
    "shape",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricComparison:
    """One figure of both runs; `ratio` is B / A."""

    name: str
    unit: str
    a: float | None
    b: float | None
    better: Literal["lower", "higher"]
    ratio: RatioInterval | None
    verdict: Verdict
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """B against A. `verdict` is that of tokens/s, or of samples/s or the step time where tokens were not counted."""

    run_a: str
    run_b: str
    verdict: Verdict
    decided_by: str
    smallest_effect: float
    metrics: tuple[MetricComparison, ...]
    differences: tuple[str, ...]
    """What ran differently: the reason for the comparison, or the reason not to trust it."""
    linearity: Linearity | None
    """Only between runs of different size."""
    strong_scaling: StrongScaling | None
    """Only between runs of different size with the same global batch."""
    notes: tuple[str, ...]


def compare_runs(a: Job, b: Job, *, smallest_effect: float = 0.01) -> RunComparison:
    """Compare run B with run A. Differences below `smallest_effect` (a fraction) are not called better or worse."""
    metrics = [
        compare_metric("tokens/s", "1/s", "higher", a, b, tokens_per_s, smallest_effect),
        compare_metric("samples/s", "1/s", "higher", a, b, samples_per_s, smallest_effect),
        compare_metric("step time", "s", "lower", a, b, step_seconds, smallest_effect),
    ]
    metrics += [compare_metric(name, "s", "lower", a, b, phase_seconds(name), smallest_effect) for name in PHASES]
    metrics += [
        plain_metric("peak reserved", "bytes", a.peak_reserved_bytes, b.peak_reserved_bytes),
        plain_metric("peak resident", "bytes", a.peak_rss_bytes, b.peak_rss_bytes),
    ]
    deciding = next((metric for metric in metrics[:3] if metric.a is not None and metric.b is not None), metrics[2])
    linear, strong = scaling(a, b)
    return RunComparison(
        run_a=a.facts.run,
        run_b=b.facts.run,
        verdict=deciding.verdict,
        decided_by=deciding.name,
        smallest_effect=smallest_effect,
        metrics=tuple(metrics),
        differences=differing_facts(a.recorded_facts, b.recorded_facts),
        linearity=linear,
        strong_scaling=strong,
        notes=tuple(f"{name}: {note}" for name, job in (("A", a), ("B", b)) for note in (*job.notes, *busy(job))),
    )


Measure = Callable[[StepRecord], tuple[float, float] | None]
"""(numerator, denominator) of one step; a block's value is the sum of the first over the sum of the second."""


def tokens_per_s(step: StepRecord) -> tuple[float, float] | None:
    """Real tokens over seconds."""
    return None if step.tokens is None or not step.step_ns else (step.tokens, step.step_ns / 1e9)


def samples_per_s(step: StepRecord) -> tuple[float, float] | None:
    """Samples over seconds."""
    return None if step.samples is None or not step.step_ns else (step.samples, step.step_ns / 1e9)


def step_seconds(step: StepRecord) -> tuple[float, float] | None:
    """Seconds over steps."""
    return (step.step_ns / 1e9, 1.0) if step.step_ns else None


def phase_seconds(name: str) -> Measure:
    """Seconds of one phase over steps."""

    def measure(step: StepRecord) -> tuple[float, float] | None:
        value = step.phases_ns.get(name)
        return None if value is None else (value / 1e9, 1.0)

    return measure


def compare_metric(
    name: str,
    unit: str,
    better: Literal["lower", "higher"],
    a: Job,
    b: Job,
    measure: Measure,
    smallest_effect: float,
) -> MetricComparison:
    """One metric by blocks of consecutive steps, unpaired: the runs did not happen at the same time."""
    blocks_a, blocks_b = block_rates(a.counting_steps, measure), block_rates(b.counting_steps, measure)
    mean_a, mean_b = (None if blocks is None else float(np.mean(blocks)) for blocks in (blocks_a, blocks_b))
    if blocks_a is None or blocks_b is None:
        why = f"not measured in {'A' if blocks_a is None else 'B'}"
    elif min(blocks_a) <= 0.0 or min(blocks_b) <= 0.0:
        why = "zero in some steps: there is no ratio"
    elif neighbours_resemble(blocks_a) or neighbours_resemble(blocks_b):
        why = f"run {'A' if neighbours_resemble(blocks_a) else 'B'} drifts: its figure depends on when one looks"
    else:
        why = None
    if why is not None or blocks_a is None or blocks_b is None:
        return MetricComparison(
            name=name, unit=unit, a=mean_a, b=mean_b, better=better, ratio=None, verdict="cannot tell", reason=why
        )
    ratio = ratio_interval(blocks_b, blocks_a, statistic="mean", paired=False)
    return MetricComparison(
        name=name,
        unit=unit,
        a=mean_a,
        b=mean_b,
        better=better,
        ratio=ratio,
        verdict=verdict(ratio, better=better, smallest_effect=smallest_effect),
        reason=ratio.reason,
    )


def block_rates(steps: Sequence[StepRecord], measure: Measure) -> list[float] | None:
    """Sum over sum in blocks of consecutive steps; None when a step lacks the figure.

    As many blocks of NUM_BLOCKS as leave neighbours unlike each other, at least the last of them.
    """
    parts = [measure(step) for step in steps]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    values = np.array(known, dtype=np.float64)
    rates: list[float] = []
    for num_blocks in NUM_BLOCKS:
        blocks = np.array_split(values, min(num_blocks, len(known)))
        rates = [float(block[:, 0].sum() / block[:, 1].sum()) for block in blocks]
        if not neighbours_resemble(rates):
            break
    return rates


def plain_metric(name: str, unit: str, a: float | None, b: float | None) -> MetricComparison:
    """A figure that exists once per run: shown, never judged."""
    reason = "one value per run has no interval" if a is not None and b is not None else "not measured in both runs"
    return MetricComparison(
        name=name, unit=unit, a=a, b=b, better="lower", ratio=None, verdict="cannot tell", reason=reason
    )


def differing_facts(a: RunFacts, b: RunFacts) -> tuple[str, ...]:
    """One sentence per property of the runs that is not the same."""
    found = []
    for name in COMPARED_FACTS:
        one, other = getattr(a, name), getattr(b, name)
        if one != other:
            found.append(f"{name.replace('_', ' ')}: {one} and {other}")
    if a.environment is not None and b.environment is not None:
        for name in ("cpu_model", "affinity", "kernel", "python", "headrace", "torch", "transformers", "git_commit"):
            one, other = getattr(a.environment, name), getattr(b.environment, name)
            if one != other:
                found.append(f"{name.replace('_', ' ')}: {one} and {other}")
    return tuple(found)


def busy(job: Job) -> tuple[str, ...]:
    """A machine that was already full when the run started measured somebody else's work, too."""
    environment = job.recorded_facts.environment
    if environment is None or environment.load_average is None:
        return ()
    load, cores = environment.load_average[0], len(environment.affinity)
    if load <= cores:
        return ()
    return (f"load average {load:.1f} on {cores} cores when it started: what else ran there is in its times",)


def scaling(a: Job, b: Job) -> tuple[Linearity | None, StrongScaling | None]:
    """Linearity from the smaller to the larger run; strong scaling beside it when the global batch is the same."""
    small, large = sorted((scaling_point(a), scaling_point(b)), key=lambda point: point.num_devices)
    if small.num_devices == large.num_devices:
        return None, None
    strong = None
    batches = [
        None if one.samples_per_data_rank is None else one.samples_per_data_rank * (one.data_parallel_size or 1)
        for one in (small, large)
    ]
    if batches[0] is not None and batches[0] == batches[1] and small.step_seconds and large.step_seconds:
        strong = strong_scaling(small.step_seconds, large.step_seconds, large.num_devices / small.num_devices)
    return compare_scaling(small, large), strong
