"""Two recorded runs side by side: better, worse, or cannot tell.

Every figure is a sum over a sum of all steps that count, and so is every draw of its interval: the value, the ratio and
the verdict of tokens/s and of the step time cannot contradict each other. The interval covers the noise inside the
runs: consecutive steps are put into blocks, long enough that neighbouring blocks do not resemble each other, and blocks
are resampled. A run that drifts has no such blocks, and gets no verdict. The interval does not cover what differs
between two starts of the same job (placement, temperature, neighbours): a difference of a few per cent between two
single runs is worth repeating before it is worth believing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.measure.job import Job, scaling_point
from headrace.measure.linearity import Linearity, StrongScaling, compare_scaling, strong_scaling
from headrace.measure.phases import PHASES
from headrace.measure.record import RunFacts, StepRecord
from headrace.measure.sense import zero_or_more
from headrace.measure.statistics import (
    MIN_BLOCKS,
    RatioInterval,
    Verdict,
    has_trend,
    neighbours_resemble,
    ratio_of_sums,
    sum_over_sum,
    verdict,
)
from headrace.wording import counted

NUM_BLOCKS = (20, 14, 10, 8, MIN_BLOCKS)
"""Tried in this order: fewer blocks are longer, and less alike."""
COMPARED_FACTS = (
    "label", "world_size", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size",
    "context_parallel_size", "num_nodes", "device", "device_name", "dtype", "sequence_length", "attention", "recompute",
)  # fmt: skip
COMPARED_ENVIRONMENT = (
    "cpu_model", "affinity", "kernel", "python", "headrace", "torch", "transformers", "git_commit",
)  # fmt: skip
MODEL_FACTS = ("model", "num_parameters")
SAME_WORK = 0.02
"""Packed rows and the last batch differ a little from run to run; the mean work of a step above this differs."""
WORK = {
    "samples": "samples per step",
    "tokens": "tokens per step",
    "padded_tokens": "computed tokens per step",
    "model_flops": "operations per step",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricComparison:
    """One figure of both runs, over all steps that count; `ratio` is b / a."""

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
    same_work: bool
    """False: the model or what a step holds is not the same, and faster does not mean that the same is done sooner."""
    differences: tuple[str, ...]
    """What ran differently: the reason for the comparison, or the reason not to trust it."""
    linearity: Linearity | None
    """Only between runs of different size."""
    strong_scaling: StrongScaling | None
    """Only between runs of different size with the same global batch."""
    notes: tuple[str, ...]


def compare_runs(a: Job, b: Job, *, smallest_effect: float = 0.01) -> RunComparison:
    """Compare run B with run A. Differences below `smallest_effect` (a fraction) are not called better or worse.

    Raises ConfigError for an effect that is no number of 0 or more.
    """
    if not zero_or_more(smallest_effect):
        raise ConfigError(f"smallest_effect is a fraction of 0 or more, such as 0.01, got {smallest_effect}")
    work = (*differing_model(a.recorded_facts, b.recorded_facts), *differing_work(a, b))
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
        same_work=not work,
        differences=(*work, *differing_facts(a.recorded_facts, b.recorded_facts)),
        linearity=linear,
        strong_scaling=strong,
        notes=tuple(f"{name}: {note}" for name, job in (("A", a), ("B", b)) for note in (*job.notes, *busy(job))),
    )


Measure = Callable[[StepRecord], tuple[float, float] | None]
"""(numerator, denominator) of one step; a figure is the sum of the first over the sum of the second.

Whole nanoseconds and counts: their sums are exact, so that equal blocks are equal for a rate and for its reciprocal.
"""
Sums = npt.NDArray[np.float64]
"""[steps or blocks, 2], as `Measure` gives them."""


def tokens_per_s(step: StepRecord) -> tuple[float, float] | None:
    """Real tokens over seconds."""
    return None if step.tokens is None or not step.step_ns else (step.tokens * 1e9, step.step_ns)


def samples_per_s(step: StepRecord) -> tuple[float, float] | None:
    """Samples over seconds."""
    return None if step.samples is None or not step.step_ns else (step.samples * 1e9, step.step_ns)


def step_seconds(step: StepRecord) -> tuple[float, float] | None:
    """Seconds over steps."""
    return (step.step_ns, 1e9) if step.step_ns else None


def phase_seconds(name: str) -> Measure:
    """Seconds of one phase over steps."""

    def measure(step: StepRecord) -> tuple[float, float] | None:
        value = step.phases_ns.get(name)
        return None if value is None else (value, 1e9)

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
    sums_a, sums_b = step_sums(a.counting_steps, measure), step_sums(b.counting_steps, measure)
    ratio = None
    if sums_a is None or sums_b is None:
        reason: str | None = f"not measured in {'A' if sums_a is None else 'B'}"
    else:
        blocks_a, blocks_b = (
            block_sums(sums, MIN_BLOCKS) if (unlike := unlike_blocks(sums)) is None else unlike
            for sums in (sums_a, sums_b)
        )
        if not ((blocks_a > 0.0).all() and (blocks_b > 0.0).all()):
            reason = "zero in some steps: there is no ratio"
        else:
            ratio = ratio_of_sums(blocks_b, blocks_a)
            drifting = [run for run, sums in (("A", sums_a), ("B", sums_b)) if drifts(sums, smallest_effect)]
            if drifting and ratio.reason is None:
                who = f"run {drifting[0]} drifts: its" if len(drifting) == 1 else "both runs drift: their"
                ratio = replace(ratio, low=None, high=None, reason=f"{who} figure depends on when one looks")
            reason = ratio.reason
    return MetricComparison(
        name=name,
        unit=unit,
        a=None if sums_a is None else sum_over_sum(sums_a),
        b=None if sums_b is None else sum_over_sum(sums_b),
        better=better,
        ratio=ratio,
        verdict="cannot tell" if ratio is None else verdict(ratio, better=better, smallest_effect=smallest_effect),
        reason=reason,
    )


def step_sums(steps: Sequence[StepRecord], measure: Measure) -> Sums | None:
    """The parts of every step; None when there is no step, or one lacks the figure."""
    parts = [measure(step) for step in steps]
    known = [part for part in parts if part is not None]
    return np.array(known, dtype=np.float64) if known and len(known) == len(parts) else None


def block_sums(sums: Sums, num_blocks: int) -> Sums:
    """Parts of blocks of consecutive steps, whose lengths differ by one at most."""
    return np.array([block.sum(axis=0) for block in np.array_split(sums, min(num_blocks, len(sums)))])


def block_rates(sums: Sums, num_blocks: int) -> Sums:
    """The figure of each block, float64 [blocks]."""
    blocks = block_sums(sums, num_blocks)
    return np.asarray(blocks[:, 0] / blocks[:, 1])


def unlike_blocks(sums: Sums) -> Sums | None:
    """As many blocks of NUM_BLOCKS as leave neighbours unlike each other; None when no number does."""
    unlike = (count for count in NUM_BLOCKS if not neighbours_resemble(block_rates(sums, count)))
    found = next(unlike, None)
    return None if found is None else block_sums(sums, found)


def drifts(sums: Sums, smallest_effect: float) -> bool:
    """Whether the figure depends on when one looks: it rises or falls throughout, or blocks of any length are alike.

    Only where the longest blocks differ by more than `smallest_effect`: below, it matters to nobody.
    """
    longest = block_rates(sums, MIN_BLOCKS)
    if longest.max() <= (1.0 + smallest_effect) * longest.min():
        return False
    return has_trend(block_rates(sums, NUM_BLOCKS[0])) or unlike_blocks(sums) is None


def plain_metric(name: str, unit: str, a: float | None, b: float | None) -> MetricComparison:
    """A figure that exists once per run: shown, never judged."""
    reason = "one value per run has no interval" if a is not None and b is not None else "not measured in both runs"
    return MetricComparison(
        name=name, unit=unit, a=a, b=b, better="lower", ratio=None, verdict="cannot tell", reason=reason
    )


def differing_model(a: RunFacts, b: RunFacts) -> Iterator[str]:
    """One sentence per property of the model that is known of both runs and not the same."""
    yield from differing(a, b, [name for name in MODEL_FACTS if None not in (getattr(a, name), getattr(b, name))])
    if a.shape is not None and b.shape is not None:
        for text in differing(a.shape, b.shape, [field.name for field in fields(a.shape)]):
            yield f"model's {text}"
    elif a.shape != b.shape:
        yield f"the model's shape is recorded in {'A' if b.shape is None else 'B'} only"


def differing_work(a: Job, b: Job) -> Iterator[str]:
    """What a step of the job holds: samples, tokens, operations.

    A larger job may hold as much more (weak scaling) or the same in all (strong scaling): neither is other work.
    """
    larger = b.recorded_facts.data_parallel_size / a.recorded_facts.data_parallel_size
    for name, words in WORK.items():
        one, other = mean_count(a, name), mean_count(b, name)
        if not one or not other:
            continue
        if all(abs(other / one / factor - 1.0) > SAME_WORK for factor in (1.0, larger)):
            yield f"{words}: {one:,.6g} and {other:,.6g}"


def mean_count(job: Job, name: str) -> float | None:
    """Mean of one of a step's counts; None when a step lacks it."""
    counts = [getattr(step, name) for step in job.counting_steps]
    return sum(counts) / len(counts) if counts and None not in counts else None


def differing_facts(a: RunFacts, b: RunFacts) -> Iterator[str]:
    """One sentence per circumstance of the runs that is not the same."""
    yield from differing(a, b, COMPARED_FACTS)
    if a.environment is not None and b.environment is not None:
        yield from differing(a.environment, b.environment, COMPARED_ENVIRONMENT)


def differing(a: object, b: object, names: Sequence[str]) -> Iterator[str]:
    """ "dtype: float32 and bfloat16" for each of `names` that is not the same in both."""
    for name in names:
        one, other = getattr(a, name), getattr(b, name)
        if one != other:
            yield f"{name.replace('_', ' ')}: {one} and {other}"


def busy(job: Job) -> tuple[str, ...]:
    """A machine that was already full when the run started measured somebody else's work, too."""
    environment = job.recorded_facts.environment
    if environment is None or environment.load_average is None:
        return ()
    load, cores = environment.load_average[0], len(environment.affinity)
    if load <= cores:
        return ()
    where = f"load average {load:.1f} on {counted(cores, 'core')} when it started"
    return (f"{where}: what else ran there is in its times",)


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
