"""Is lateness more than noise? Size, persistence, and a mean that stands clear of its own scatter.

On a busy machine some rank is last in every step, by much, and with two ranks a coin decides which: six heads of eight
are no fault of rank 0. So a rank is compared with the others of the same step,

    net lateness = own lateness - median lateness of the other ranks

and its mean over the steps has to pass Student's t at 1 % on top of size and persistence. What passes but comes and
goes is named without being called sure, and a job whose lateness scatters too widely to show a delay is not called
healthy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal, TypeAlias

from headrace.traces.median_of_others import medians_of_others
from headrace.traces.step_times import JudgedSteps
from headrace.traces.waits import RankStep

Sure: TypeAlias = Literal["high", "medium", "low"]

MIN_SHARE = 0.03
"""Of the step: what a rank has to cost the job before anybody is sent to look. Healthy ranks on shared cores differ by
1.3 % on average over eight steps."""
MIN_PERSISTENCE = 0.7
"""Of the steps."""
FEW_STEPS, MIN_SHARE_OF_FEW = 3, 0.2
"""With fewer steps there is neither persistence nor scatter: only a large delay is named, as late in this step."""

CERTAIN_STEPS, CERTAIN_PERSISTENCE, CERTAIN_SHARE = 5, 0.9, 0.10
"""From here on a verdict calls itself sure."""
CERTAIN_SCATTER, LIKELY_SCATTER = 0.2, 0.5
"""Standard deviation over mean. A fault delays every step by about as much. A core shared with other processes delays
at random, but for seconds on end the same rank: the t-test, which takes steps for independent, passes then. Seen: 0.04
where one rank had more to do, 0.33 to 0.69 where other processes took its core."""

MENTIONED_SHARE = 0.01
"""Of the step: a steady delay below MIN_SHARE is no verdict, but worth a word."""

_STUDENT_1_PERCENT = (
    (30, 2.46), (20, 2.53), (15, 2.60), (10, 2.76), (8, 2.90), (7, 3.00), (6, 3.14), (5, 3.36), (4, 3.75), (3, 4.54),
    (2, 6.96),
)  # fmt: skip
"""(degrees of freedom, quantile), one-sided; between two rows the stricter one holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """A rank that is late by the rule."""

    rank: int
    mean_ns: float
    """Net lateness per step."""
    share: float
    """Of the step."""
    steps_late: int
    scatter: float
    """Standard deviation over mean of the net lateness; 0 below three steps."""


def net_lateness(
    steps: JudgedSteps, lateness_ns: Mapping[RankStep, int], ranks: Iterable[int]
) -> dict[int, dict[int | None, float]]:
    """Rank -> step -> lateness beyond the median of the others, ns; negative where others were later."""
    everyone = sorted({*ranks, *(rank for rank, _ in lateness_ns)})
    net: dict[int, dict[int | None, float]] = {rank: {} for rank in everyone}
    for step in steps.numbers:
        own = {rank: lateness_ns.get((rank, step), 0) for rank in everyone}
        others = medians_of_others(own)
        for rank in everyone:
            net[rank][step] = own[rank] - others.get(rank, 0)
    return net


def find_suspects(steps: JudgedSteps, net_ns: Mapping[int, Mapping[int | None, float]]) -> list[Suspect]:
    """The latest first."""
    min_share = MIN_SHARE_OF_FEW if len(steps.numbers) < FEW_STEPS else MIN_SHARE
    found = []
    for rank, own in net_ns.items():
        late = sum(late_ns >= min_share * steps.time_ns[step] for step, late_ns in own.items())
        values = list(own.values())
        large = bool(values) and mean(values) >= min_share * steps.mean_ns
        if large and late >= MIN_PERSISTENCE * len(values) and _stands_clear(values):
            found.append(
                Suspect(
                    rank=rank,
                    mean_ns=mean(values),
                    share=mean(values) / steps.mean_ns,
                    steps_late=late,
                    scatter=_deviation(values) / mean(values),
                )
            )
    return sorted(found, key=lambda suspect: -suspect.mean_ns)


def how_sure(suspect: Suspect, num_steps: int) -> Sure:
    """high: many steps, nearly all of them late, by a tenth of the step and by about as much each time."""
    if num_steps < FEW_STEPS or suspect.scatter > LIKELY_SCATTER:
        return "low"
    persists = suspect.steps_late >= CERTAIN_PERSISTENCE * num_steps
    steady = suspect.scatter <= CERTAIN_SCATTER
    large = suspect.share >= CERTAIN_SHARE
    return "high" if num_steps >= CERTAIN_STEPS and persists and steady and large else "medium"


def hidden_ns(net_ns: Mapping[int, Mapping[int | None, float]]) -> float:
    """The largest delay per step that could pass for chance in the scatter of some rank; 0 below three steps."""
    return max((_chance_ns(list(own.values())) for own in net_ns.values()), default=0.0)


def closest(steps: JudgedSteps, net_ns: Mapping[int, Mapping[int | None, float]]) -> tuple[int, float] | None:
    """(rank, mean net lateness) of the latest rank, if its lateness is no chance and more than MENTIONED_SHARE."""
    means = {rank: mean(own.values()) for rank, own in net_ns.items() if own}
    rank = max(means, key=lambda candidate: means[candidate], default=None)
    if rank is None or len(steps.numbers) < FEW_STEPS or not _stands_clear(list(net_ns[rank].values())):
        return None
    return (rank, means[rank]) if means[rank] >= MENTIONED_SHARE * steps.mean_ns else None


def _stands_clear(values: list[float]) -> bool:
    """Is the mean above zero by more than its standard error allows for chance? Nothing to test below three values."""
    return len(values) < FEW_STEPS or bool(mean(values) > _chance_ns(values))


def _chance_ns(values: list[float]) -> float:
    """What the mean of so many values with this scatter reaches by chance in 1 % of all cases."""
    if len(values) < FEW_STEPS:
        return 0.0
    limit = next(quantile for freedom, quantile in _STUDENT_1_PERCENT if len(values) - 1 >= freedom)
    return limit * _deviation(values) / math.sqrt(len(values))


def _deviation(values: list[float]) -> float:
    return stdev(values) if len(values) >= FEW_STEPS else 0.0
