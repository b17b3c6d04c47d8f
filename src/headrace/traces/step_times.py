"""How long is a step, and how much longer than its peers does one rank compute or idle in it?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from headrace.traces.median_of_others import medians_of_others
from headrace.traces.timeline import RankTrace, StepLanes

FIRST_STEP_FACTOR = 2.0
"""A first step this much longer than the median of the others holds the profiler's own start, compilation or a cold
cache: no verdict is built on it (nsys-ai PR#227 named such a gap the bottleneck)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedSteps:
    """The steps a verdict may be built on."""

    numbers: tuple[int | None, ...]
    time_ns: dict[int | None, int]
    """Median of the ranks' e2e, of all steps."""
    left_out: tuple[int | None, ...]

    @property
    def mean_ns(self) -> float:
        """Mean length of the judged steps; 0 without any."""
        return mean(self.time_ns[step] for step in self.numbers) if self.numbers else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Excess:
    """Mean per step: one rank's time minus the median of its stage, microseconds. None where it is not known."""

    computing_us: float | None
    idle_us: float | None
    data_us: float | None


def judged_steps(traces: Sequence[RankTrace]) -> JudgedSteps:
    """All steps but a first one that is far longer than the rest."""
    time_ns = _step_times(traces)
    numbers = tuple(time_ns)
    left_out: tuple[int | None, ...] = ()
    if len(numbers) > 2:
        rest = median(time_ns[step] for step in numbers[1:])
        if time_ns[numbers[0]] > FIRST_STEP_FACTOR * rest:
            left_out, numbers = numbers[:1], numbers[1:]
    return JudgedSteps(numbers=numbers, time_ns=time_ns, left_out=left_out)


def excess_over_stage(traces: Sequence[RankTrace], steps: JudgedSteps, rank: int) -> Excess:
    """The rank against the median of the other traced ranks of its pipeline stage."""

    def mean_us(value: Callable[[StepLanes], int | None]) -> float | None:
        by_step = over_stage_ns(traces, value)
        known = [by_step[rank, step] for step in steps.numbers if (rank, step) in by_step]
        return mean(known) / 1000 if known else None

    return Excess(
        computing_us=mean_us(lambda lanes: lanes.computing_ns),
        idle_us=mean_us(lambda lanes: lanes.idle_ns),
        data_us=mean_us(lambda lanes: lanes.data_ns),
    )


def over_stage_ns(
    traces: Sequence[RankTrace], value: Callable[[StepLanes], int | None]
) -> dict[tuple[int, int | None], float]:
    """(rank, step) -> value minus the median of the other ranks of its stage; only where both are known."""
    found: dict[tuple[int, int | None], float] = {}
    for (_, step), own in by_stage_and_step(traces, value).items():
        for rank, others in medians_of_others(own).items():
            found[rank, step] = own[rank] - others
    return found


def by_stage_and_step(
    traces: Sequence[RankTrace], value: Callable[[StepLanes], int | None]
) -> dict[tuple[int | None, int | None], dict[int, int]]:
    """(stage, step) -> rank -> value, as far as known."""
    found: defaultdict[tuple[int | None, int | None], dict[int, int]] = defaultdict(dict)
    for trace in traces:
        for lanes in trace.lanes:
            known = value(lanes)
            if trace.rank is not None and known is not None:
                found[trace.stage, lanes.step][trace.rank] = known
    return dict(found)


def host_gap_ns(lanes: StepLanes) -> int | None:
    """How long the device had nothing to do because the host had not asked for it: loading, launching, Python."""
    if lanes.host_launch_ns is None:
        return None
    return lanes.host_launch_ns + (lanes.data_ns or 0)


def computing_ns(lanes: StepLanes) -> int | None:
    """The value most comparisons are about."""
    return lanes.computing_ns


def _step_times(traces: Sequence[RankTrace]) -> dict[int | None, int]:
    """Step -> median of the ranks' e2e; where no rank has lanes, the span of its collectives."""
    known: defaultdict[int | None, list[int]] = defaultdict(list)
    for trace in traces:
        for lanes in trace.lanes:
            known[lanes.step].append(lanes.e2e_ns)
    if not known:
        for trace in traces:
            moments: defaultdict[int | None, list[int]] = defaultdict(list)
            for collective in trace.collectives:
                moments[collective.step] += [collective.start_ns, collective.end_ns]
            for step, own in moments.items():
                known[step].append(max(own) - min(own))
    ordered = sorted(known.items(), key=lambda item: -1 if item[0] is None else item[0])
    return {step: round(median(times)) for step, times in ordered if median(times) > 0}
