"""Is one rank holding up the others, and what kind of fault is it?

Three kinds of evidence:
  peers      the trace says whom each wait was for (Ascend). It can name a rank that was not traced
  waits      all ranks of a group were traced: who arrives last, by how much, in how many steps (waits.py)
  computing  a table of operations: computing time per step against the median of the rank's pipeline stage

Blame needs size, persistence and more than chance (suspects.py). Where the waits scatter too widely for that, a rank
whose host leaves its device idle in every step is still seen, if the others wait for it (_held_by_host). The class:
  card, host   what the late rank did longer than the others (cause.py)
  partition    no rank is late within its stage, but one stage computes > 10 % longer than another
  data         a different rank is late from step to step, and computes longer in just that step: uneven batches
  none         nobody; in a healthy job some rank is last in every step too, but not the same, and not by much
  undecidable  one rank only, ranks missing, nothing paired: the data cannot say, so nobody is named
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any, Literal, TypeAlias

from headrace.traces.cause import LOOK_INTO_GAP, find_cause
from headrace.traces.median_of_others import medians_of_others
from headrace.traces.peers import lateness_by_peer
from headrace.traces.step_times import (
    Excess,
    JudgedSteps,
    by_stage_and_step,
    computing_ns,
    excess_over_stage,
    host_gap_ns,
    judged_steps,
    over_stage_ns,
)
from headrace.traces.suspects import (
    CERTAIN_SCATTER,
    CERTAIN_STEPS,
    FEW_STEPS,
    MIN_PERSISTENCE,
    MIN_SHARE,
    Sure,
    Suspect,
    closest,
    find_suspects,
    hidden_ns,
    how_sure,
    net_lateness,
)
from headrace.traces.timeline import RankTrace
from headrace.traces.uneven_work import slow_stage, stage_computing_ns, wandering_ranks
from headrace.traces.waits import RankStep, Waits

Verdict: TypeAlias = Literal["card", "host", "partition", "data", "none", "undecidable"]

COMPUTES_LONGER = 1.10
"""Times the median of the stage, where a table of operations is all there is."""

REACHES_OTHERS = 1 / 3
"""A gap on a rank's host counts only if at least so much of it made the others wait: the rest may be hidden behind
another rank that was late by chance, or it may be a rank with less to compute, for whom nobody waits."""

DISPROVED_BY = {
    "partition": "move a layer from the slow stage to another: if the stage stays behind by as much, it is its cards",
    "data": "train on batches of equal cost: if a rank is still late in every step, it is not the data",
    "none": "a trace of more steps in which the same rank is last by more than 3 % of the step in most of them",
    "undecidable": "traces of all ranks of one group over several steps",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRank:
    """The verdict and what it rests on."""

    verdict: Verdict
    rank: int | None
    traced: bool | None
    """Whether the named rank's own trace was there; None when no rank is named."""
    what: str
    sure: Sure | None = None
    lateness_ns: int | None = None
    """Mean per step."""
    share_of_step: float | None = None
    steps_late: int | None = None
    num_steps: int = 0
    also_late: tuple[int, ...] = ()
    disproved_by: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


def judge_slow_rank(traces: Sequence[RankTrace], waits: Waits) -> SlowRank:
    """Apply the rules. Every trace has a rank, and no two have the same."""
    steps = judged_steps(traces)
    if any(trace.format == "op_table" for trace in traces):
        return _by_computing(traces, steps)
    if any(trace.peer_waits for trace in traces):
        return _judge(traces, steps, lateness_by_peer(traces), "peers")
    if waits.num_telling:
        return _judge(traces, steps, waits.lateness_ns, "waits")
    return _undecidable(traces, steps)


def _judge(traces: Sequence[RankTrace], steps: JudgedSteps, lateness_ns: Mapping[RankStep, int], rule: str) -> SlowRank:
    net_ns = net_lateness(steps, lateness_ns, (trace.rank for trace in traces if trace.rank is not None))
    evidence: dict[str, Any] = {
        "rule": rule,
        "lateness_us_per_step": {str(rank): _us(mean(own.values())) for rank, own in net_ns.items() if own},
        "steps_left_out": list(steps.left_out),
    }
    if suspects := find_suspects(steps, net_ns):
        return _accuse(traces, steps, suspects, net_ns[suspects[0].rank], evidence)
    if gaps := _held_by_host(traces, steps, net_ns):
        return _accuse_host(traces, steps, gaps, evidence)
    if wandering := wandering_ranks(traces, steps, lateness_ns):
        on_cpu = any(trace.device == "cpu" for trace in traces)
        return _blame_data(steps, wandering, evidence, on_cpu=on_cpu)
    return _blame_partition_or_nobody(traces, steps, net_ns, evidence)


def _by_computing(traces: Sequence[RankTrace], steps: JudgedSteps) -> SlowRank:
    """A table of operations: what a rank computes beyond the others of its stage is what they wait for."""
    excess_ns: dict[RankStep, int] = {}
    ratios: defaultdict[int, list[float]] = defaultdict(list)
    for (_, step), own in by_stage_and_step(traces, computing_ns).items():
        middle = median(own.values())
        for rank, others_ns in medians_of_others(own).items():
            if own[rank] >= COMPUTES_LONGER * others_ns:
                excess_ns[rank, step] = round(own[rank] - others_ns)
            if middle and step in steps.numbers:
                ratios[rank].append(own[rank] / middle)
    judged = _judge(traces, steps, excess_ns, "computing")
    over_stage = {str(rank): round(median(own), 4) for rank, own in sorted(ratios.items())}
    return replace(judged, evidence=judged.evidence | {"computing_over_median_of_stage": over_stage})


def _held_by_host(
    traces: Sequence[RankTrace], steps: JudgedSteps, net_ns: Mapping[int, Mapping[int | None, float]]
) -> list[Suspect]:
    """Ranks whose device waits for its host longer than the others' by the same rules, and that the others wait for.

    Idle time scatters much less than lateness where cores are shared: operators are slowed down at random, and they
    are most of a step.
    """
    excess_ns: defaultdict[int, dict[int | None, float]] = defaultdict(dict)
    for (rank, step), longer_ns in over_stage_ns(traces, host_gap_ns).items():
        if step in steps.numbers:
            excess_ns[rank][step] = longer_ns
    whole = {rank: own for rank, own in excess_ns.items() if len(own) == len(steps.numbers) >= FEW_STEPS}
    return [
        suspect
        for suspect in find_suspects(steps, whole)
        if mean(net_ns[suspect.rank].values()) >= REACHES_OTHERS * suspect.mean_ns
    ]


def _accuse(
    traces: Sequence[RankTrace],
    steps: JudgedSteps,
    suspects: list[Suspect],
    net_ns: Mapping[int | None, float],
    evidence: dict[str, Any],
) -> SlowRank:
    chief, num_steps = suspects[0], len(steps.numbers)
    traced = any(trace.rank == chief.rank for trace in traces)
    excess = excess_over_stage(traces, steps, chief.rank) if traced else None
    late = {suspect.rank for suspect in suspects}
    is_steady = chief.scatter <= CERTAIN_SCATTER
    cause = find_cause(traces, chief.rank, late, chief.mean_ns, excess, is_steady=is_steady)
    evidence |= {
        "explained_by": cause.why,
        "lateness_us_by_step": {str(step): _us(late_ns) for step, late_ns in net_ns.items()},
    }
    if excess is not None:
        evidence["excess_us_per_step"] = _by_name(excess)
    extent = _extent(chief.steps_late, num_steps)
    what = (
        f"rank {chief.rank} is late by {chief.mean_ns / 1e6:.1f} ms per step ({chief.share:.0%}) {extent}; {cause.why}"
    )
    if not traced:
        what += f". Rank {chief.rank} itself was not traced: the others' waits name it"
    sure = how_sure(chief, num_steps)
    if not is_steady:
        what += f". The delay comes and goes: it scatters by {chief.scatter:.0%} of itself from step to step"
    return SlowRank(
        verdict=cause.verdict,
        rank=chief.rank,
        traced=traced,
        what=what,
        sure=sure if cause.explained or sure == "low" else "medium",
        lateness_ns=round(chief.mean_ns),
        share_of_step=chief.share,
        steps_late=chief.steps_late,
        num_steps=num_steps,
        also_late=tuple(sorted(late - {chief.rank})),
        disproved_by=cause.disproved_by,
        evidence=evidence,
    )


def _accuse_host(
    traces: Sequence[RankTrace], steps: JudgedSteps, gaps: list[Suspect], evidence: dict[str, Any]
) -> SlowRank:
    """By the gap alone: never surely, since the others' waits did not convict the rank."""
    chief, num_steps = gaps[0], len(steps.numbers)
    late_us = evidence["lateness_us_per_step"][str(chief.rank)]
    on_cpu = any(trace.rank == chief.rank and trace.device == "cpu" for trace in traces)
    gap = "runs no operator" if on_cpu else "leaves its device idle"
    return SlowRank(
        verdict="host",
        rank=chief.rank,
        traced=True,
        what=f"rank {chief.rank} {gap} for {chief.mean_ns / 1e6:.1f} ms per step ({chief.share:.0%}) longer than the "
        f"others, {_extent(chief.steps_late, num_steps)}. The others waited {late_us / 1000:.1f} ms for it, "
        "but too unevenly to convict it by that alone: all ranks are late now and then, as on busy cores",
        sure="medium",
        lateness_ns=round(chief.mean_ns),
        share_of_step=chief.share,
        steps_late=chief.steps_late,
        num_steps=num_steps,
        also_late=tuple(sorted(suspect.rank for suspect in gaps[1:])),
        disproved_by=LOOK_INTO_GAP,
        evidence=evidence
        | {
            "rule": f"host gap, beside {evidence['rule']}",
            "excess_us_per_step": _by_name(excess_over_stage(traces, steps, chief.rank)),
        },
    )


def _blame_data(
    steps: JudgedSteps, wandering: Mapping[int | None, int], evidence: dict[str, Any], *, on_cpu: bool
) -> SlowRank:
    ranks = sorted(set(wandering.values()))
    extent = _extent(len(wandering), len(steps.numbers))
    why = "the batches are uneven"
    if on_cpu:  # an operator that lost its core for a while looks like one with more to do
        why += ", or other processes take the ranks' cores now and then"
    return SlowRank(
        verdict="data",
        rank=None,
        traced=None,
        what=f"no rank is slow, but {why}: {extent} one of the ranks {ranks} comes last, a different "
        "one from step to step, and computes longer in just that step",
        sure="medium" if len(steps.numbers) >= CERTAIN_STEPS and not on_cpu else "low",
        steps_late=len(wandering),
        num_steps=len(steps.numbers),
        disproved_by=DISPROVED_BY["data"],
        evidence=evidence | {"last_by_step": {str(step): rank for step, rank in wandering.items()}},
    )


def _blame_partition_or_nobody(
    traces: Sequence[RankTrace],
    steps: JudgedSteps,
    net_ns: Mapping[int, Mapping[int | None, float]],
    evidence: dict[str, Any],
) -> SlowRank:
    stages = stage_computing_ns(traces, steps)
    if stages:
        evidence["computing_us_per_stage"] = {str(stage): _us(time_ns) for stage, time_ns in stages.items()}
    stage, num_steps = slow_stage(stages), len(steps.numbers)
    if stage is None:
        return _blame_nobody(steps, net_ns, evidence)
    return SlowRank(
        verdict="partition",
        rank=None,
        traced=None,
        what=f"no rank is slow within its stage, but stage {stage} computes "
        f"{stages[stage] / min(stages.values()) - 1:.0%} longer than the shortest: the model is divided unevenly",
        sure="medium" if num_steps >= FEW_STEPS else "low",
        num_steps=num_steps,
        disproved_by=DISPROVED_BY["partition"],
        evidence=evidence,
    )


def _blame_nobody(
    steps: JudgedSteps, net_ns: Mapping[int, Mapping[int | None, float]], evidence: dict[str, Any]
) -> SlowRank:
    """Sure only as far as a delay that matters would have shown."""
    num_steps, hidden = len(steps.numbers), hidden_ns(net_ns)
    what = f"no rank is slow: none is late by {MIN_SHARE:.0%} of the step "
    what += f"in {MIN_PERSISTENCE:.0%} of {num_steps} steps" if num_steps > 1 else "in the only step traced"
    sure: Sure = "high" if num_steps >= CERTAIN_STEPS else "low"
    if hidden > MIN_SHARE * steps.mean_ns:
        sure = "low"
        what += (
            f". But the ranks come now early, now late: a steady delay of up to {hidden / 1e6:.1f} ms "
            f"({hidden / steps.mean_ns:.0%}) would not show among that; trace more steps, or a quieter machine"
        )
    if (latest := closest(steps, net_ns)) is not None:
        rank, late_ns = latest
        what += f". Rank {rank} comes last by {late_ns / 1e6:.1f} ms per step ({late_ns / steps.mean_ns:.1%})"
    return SlowRank(
        verdict="none",
        rank=None,
        traced=None,
        what=what,
        sure=sure,
        num_steps=num_steps,
        disproved_by=DISPROVED_BY["none"],
        evidence=evidence | {"hidden_us_per_step": _us(hidden)},
    )


def _undecidable(traces: Sequence[RankTrace], steps: JudgedSteps) -> SlowRank:
    if not traces:
        why = "no rank is told apart"
    elif len(traces) < 2:
        why = "only one rank was traced"
    elif not any(trace.collectives for trace in traces):
        why = "no collective was recorded, so nobody is seen waiting"
    else:
        why = "no collective has all ranks of its group in the traces, so the last to arrive may be one of the others"
    return SlowRank(
        verdict="undecidable",
        rank=None,
        traced=None,
        what=f"cannot say whether a rank is slow: {why}",
        num_steps=len(steps.numbers),
        disproved_by=DISPROVED_BY["undecidable"],
        evidence={"rule": "none", "why": why},
    )


def _extent(steps_late: int, num_steps: int) -> str:
    return f"in {steps_late} of {num_steps} steps" if num_steps > 1 else "in the only step traced"


def _by_name(excess: Excess) -> dict[str, float | None]:
    return {"computing": excess.computing_us, "idle": excess.idle_us, "data": excess.data_us}


def _us(nanoseconds: float) -> float:
    return round(nanoseconds / 1000, 3)
