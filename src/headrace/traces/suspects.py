"""Is lateness more than noise? Size, persistence, and a mean that stands clear of its own scatter.

On a busy machine some rank is last in every step, by much, and with two ranks a coin decides which: six heads of eight
are no fault of rank 0. So a rank is compared with the others of the same step,

    net lateness = own lateness - median lateness of the other ranks

and its mean over the steps has to pass Student's t at 1 % on top of size and persistence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal, TypeAlias

from headrace.traces.median_of_others import medians_of_others
from headrace.traces.step_times import JudgedSteps
from headrace.traces.waits import RankStep

Sure: TypeAlias = Literal["high", "medium", "low"]

MIN_SHARE = 0.05
"""Of the step."""
MIN_PERSISTENCE = 0.7
"""Of the steps."""
FEW_STEPS, MIN_SHARE_OF_FEW = 3, 0.2
"""With fewer steps there is neither persistence nor scatter: only a large delay is named, as late in this step."""

CERTAIN_STEPS, CERTAIN_PERSISTENCE, CERTAIN_SHARE = 5, 0.9, 0.10
"""From here on a verdict calls itself sure."""

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
            share = mean(values) / steps.mean_ns
            found.append(Suspect(rank=rank, mean_ns=mean(values), share=share, steps_late=late))
    return sorted(found, key=lambda suspect: -suspect.mean_ns)


def how_sure(suspect: Suspect, num_steps: int) -> Sure:
    """high: many steps, nearly all of them late, by a tenth of the step."""
    persists = suspect.steps_late >= CERTAIN_PERSISTENCE * num_steps
    if num_steps >= CERTAIN_STEPS and persists and suspect.share >= CERTAIN_SHARE:
        return "high"
    return "medium" if num_steps >= FEW_STEPS else "low"


def _stands_clear(values: list[float]) -> bool:
    """Is the mean above zero by more than its standard error allows for chance? Nothing to test below three values."""
    if len(values) < FEW_STEPS:
        return True
    error = stdev(values) / len(values) ** 0.5
    limit = next(quantile for freedom, quantile in _STUDENT_1_PERCENT if len(values) - 1 >= freedom)
    return bool(mean(values) > limit * error)
