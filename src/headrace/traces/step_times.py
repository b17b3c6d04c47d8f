"""How long is a step, and how much longer than its peers does one rank compute or idle in it?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

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
    return Excess(
        computing_us=_excess_us(traces, steps, rank, lambda lanes: lanes.computing_ns),
        idle_us=_excess_us(traces, steps, rank, lambda lanes: lanes.idle_ns),
        data_us=_excess_us(traces, steps, rank, lambda lanes: lanes.data_ns),
    )


def computing_over_stage_ns(traces: Sequence[RankTrace], rank: int, step: int | None) -> float | None:
    """The rank's computing in one step minus the median of the others of its stage."""
    return _excess_in_step(traces, rank, step, lambda lanes: lanes.computing_ns)


def stage_median_ns(traces: Sequence[RankTrace], stage: int | None, step: int | None) -> float | None:
    """Median computing in one step over all traced ranks of a stage; None when no rank knows it."""
    lanes = (lanes_of(trace, step) for trace in traces if trace.stage == stage)
    known = [own.computing_ns for own in lanes if own is not None and own.computing_ns is not None]
    return median(known) if known else None


def lanes_of(trace: RankTrace, step: int | None) -> StepLanes | None:
    """The rank's lanes in one step."""
    return next((lanes for lanes in trace.lanes if lanes.step == step), None)


def _excess_us(
    traces: Sequence[RankTrace], steps: JudgedSteps, rank: int, value: Callable[[StepLanes], int | None]
) -> float | None:
    found = [_excess_in_step(traces, rank, step, value) for step in steps.numbers]
    known = [excess for excess in found if excess is not None]
    return mean(known) / 1000 if known else None


def _excess_in_step(
    traces: Sequence[RankTrace], rank: int, step: int | None, value: Callable[[StepLanes], int | None]
) -> float | None:
    stage = next((trace.stage for trace in traces if trace.rank == rank), None)
    own: int | None = None
    others: list[int] = []
    for trace in traces:
        lanes = lanes_of(trace, step)
        known = None if lanes is None else value(lanes)
        if trace.rank == rank:
            own = known
        elif trace.stage == stage and known is not None:
            others.append(known)
    return None if own is None or not others else own - median(others)


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
