"""When no single rank is to blame: batches of unequal cost (`data`) and stages of unequal work (`partition`).

data         step    1  2  3  4  5  6        partition    stage 0  ######
             last    2  0  3  0  1  2                     stage 1  ##########  <- every rank of it, every step
                     and computes longer                  stage 2  ######
                     in just that step
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from headrace.traces.step_times import JudgedSteps, by_stage_and_step, computing_ns, over_stage_ns
from headrace.traces.timeline import RankTrace
from headrace.traces.waits import RankStep

MIN_SHARE_OF_WANDERING = 0.10
"""Of the step, in each single step: nothing persists here, so each has to be plain."""
MIN_STEPS_OF_WANDERING = 0.5
EXPLAINS = 0.5
STAGE_IMBALANCE = 1.10


def wandering_ranks(
    traces: Sequence[RankTrace], steps: JudgedSteps, lateness_ns: Mapping[RankStep, int]
) -> dict[int | None, int]:
    """Step -> the rank that was late in it because it computed longer; {} unless that happens in half of the steps
    and to more than one rank."""
    longer_ns = over_stage_ns(traces, computing_ns)
    late_in: defaultdict[int | None, dict[int, int]] = defaultdict(dict)
    for (rank, step), late_ns in lateness_ns.items():
        late_in[step][rank] = late_ns
    found: dict[int | None, int] = {}
    for step in steps.numbers:
        late = late_in.get(step)
        if not late:
            continue
        rank = max(late, key=lambda candidate: late[candidate])
        large = late[rank] >= MIN_SHARE_OF_WANDERING * steps.time_ns[step]
        if large and longer_ns.get((rank, step), 0.0) >= EXPLAINS * late[rank]:
            found[step] = rank
    often = len(found) >= MIN_STEPS_OF_WANDERING * len(steps.numbers)
    return found if often and len(set(found.values())) > 1 else {}


def stage_computing_ns(traces: Sequence[RankTrace], steps: JudgedSteps) -> dict[int, float]:
    """Stage -> median computing per step over its ranks and steps; {} when a stage is unknown or there is only one."""
    known: defaultdict[int, list[int]] = defaultdict(list)
    for (stage, step), own in by_stage_and_step(traces, computing_ns).items():
        if stage is None:
            return {}
        if step in steps.numbers:
            known[stage] += own.values()
    stages = {stage: median(values) for stage, values in sorted(known.items())}
    return stages if len(stages) > 1 else {}


def slow_stage(stages: Mapping[int, float]) -> int | None:
    """The stage that computes more than 10 % longer than the shortest one; None if there is none."""
    if not stages or max(stages.values()) <= STAGE_IMBALANCE * min(stages.values()):
        return None
    return max(stages, key=lambda stage: stages[stage])
