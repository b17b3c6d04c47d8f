"""Is one rank holding up the others, and what kind of fault is it?

Three kinds of evidence:
  peers      the trace says whom each wait was for (Ascend). It can name a rank that was not traced
  waits      all ranks of a group were traced: who arrives last, by how much, in how many steps (waits.py)
  computing  a table of operations: computing time per step against the median of the rank's pipeline stage

Blame needs size, persistence and more than chance (suspects.py). Then the class:
  card         that one rank: it computes longer, or nothing seen on its host explains the delay
  host         its device sits idle longer (launching, loading), or all ranks of its host are late
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

from headrace.traces.median_of_others import medians_of_others
from headrace.traces.peers import lateness_by_peer
from headrace.traces.step_times import (
    Excess,
    JudgedSteps,
    by_stage_and_step,
    computing_ns,
    excess_over_stage,
    judged_steps,
)
from headrace.traces.suspects import (
    CERTAIN_STEPS,
    FEW_STEPS,
    MIN_PERSISTENCE,
    MIN_SHARE,
    Sure,
    Suspect,
    find_suspects,
    how_sure,
    net_lateness,
)
from headrace.traces.timeline import RankTrace
from headrace.traces.uneven_work import slow_stage, stage_computing_ns, wandering_ranks
from headrace.traces.waits import RankStep, Waits

Verdict: TypeAlias = Literal["card", "host", "partition", "data", "none", "undecidable"]

EXPLAINS = 0.5
"""A cause has to cover half of the delay."""
COMPUTES_LONGER = 1.10
"""Times the median of the stage, where a table of operations is all there is."""

DISPROVED_BY = {
    "card": "swap the card or move the rank to another host: if the delay stays with the rank's number, its work is "
    "to blame; if it stays with the host, the host is",
    "host": "pin the rank to other cores or run it on another host: if the delay follows the rank, it is its card or "
    "its work; if launches stay late with nothing else on the host, it is the program",
    "partition": "move a layer from the slow stage to another: if the stage stays behind by as much, it is its cards",
    "data": "train on batches of equal cost: if a rank is still late in every step, it is not the data",
    "none": "a trace of more steps in which the same rank is last by more than 5 % of the step in most of them",
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
    if wandering := wandering_ranks(traces, steps, lateness_ns):
        return _blame_data(steps, wandering, evidence)
    return _blame_partition_or_nobody(traces, steps, evidence)


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
    peers = "the others" if all(trace.stage is None for trace in traces) else "the others of its stage"
    verdict, why = _classify(chief, excess, _whole_host(traces, late), peers)
    evidence |= {
        "explained_by": why,
        "lateness_us_by_step": {str(step): _us(late_ns) for step, late_ns in net_ns.items()},
    }
    if excess is not None:
        evidence["excess_us_per_step"] = {
            "computing": excess.computing_us,
            "idle": excess.idle_us,
            "data": excess.data_us,
        }
    extent = f"in {chief.steps_late} of {num_steps} steps" if num_steps > 1 else "in the only step traced"
    what = f"rank {chief.rank} is late by {chief.mean_ns / 1e6:.1f} ms per step ({chief.share:.0%}) {extent}; {why}"
    if not traced:
        what += f". Rank {chief.rank} itself was not traced: the others' waits name it"
    return SlowRank(
        verdict=verdict,
        rank=chief.rank,
        traced=traced,
        what=what,
        sure=how_sure(chief, num_steps),
        lateness_ns=round(chief.mean_ns),
        share_of_step=chief.share,
        steps_late=chief.steps_late,
        num_steps=num_steps,
        also_late=tuple(sorted(late - {chief.rank})),
        disproved_by=DISPROVED_BY[verdict],
        evidence=evidence,
    )


def _classify(chief: Suspect, excess: Excess | None, host: str | None, peers: str) -> tuple[Verdict, str]:
    if host is not None:
        return "host", f"so are all traced ranks of host {host}"
    if excess is None:
        return "card", "card or host cannot be told apart from outside"
    needed_us = EXPLAINS * chief.mean_ns / 1000
    if excess.computing_us is not None and excess.computing_us >= needed_us:
        return "card", f"it computes {excess.computing_us / 1000:.1f} ms longer than {peers}"
    if excess.data_us is not None and excess.data_us >= needed_us:
        return "host", f"it waits {excess.data_us / 1000:.1f} ms longer for its data than {peers}"
    if excess.idle_us is not None and excess.idle_us >= needed_us:
        return "host", f"its device is idle {excess.idle_us / 1000:.1f} ms longer than that of {peers}"
    return "card", "neither computing nor idle time of its own explains it"


def _whole_host(traces: Sequence[RankTrace], late: set[int]) -> str | None:
    """The host whose traced ranks are exactly the late ones, if it has two or more of them and is not the only host."""
    hosts: defaultdict[str, set[int]] = defaultdict(set)
    for trace in traces:
        if trace.host is not None and trace.rank is not None:
            hosts[trace.host].add(trace.rank)
    if len(hosts) < 2:
        return None
    return next((host for host, ranks in hosts.items() if len(ranks) > 1 and ranks == late), None)


def _blame_data(steps: JudgedSteps, wandering: Mapping[int | None, int], evidence: dict[str, Any]) -> SlowRank:
    ranks = sorted(set(wandering.values()))
    extent = f"in {len(wandering)} of {len(steps.numbers)} steps"
    return SlowRank(
        verdict="data",
        rank=None,
        traced=None,
        what=f"no rank is slow, but the batches are uneven: {extent} one of the ranks {ranks} comes last, a different "
        "one from step to step, and computes longer in just that step",
        sure="medium" if len(steps.numbers) >= CERTAIN_STEPS else "low",
        steps_late=len(wandering),
        num_steps=len(steps.numbers),
        disproved_by=DISPROVED_BY["data"],
        evidence=evidence | {"last_by_step": {str(step): rank for step, rank in wandering.items()}},
    )


def _blame_partition_or_nobody(traces: Sequence[RankTrace], steps: JudgedSteps, evidence: dict[str, Any]) -> SlowRank:
    stages = stage_computing_ns(traces, steps)
    if stages:
        evidence["computing_us_per_stage"] = {str(stage): _us(time_ns) for stage, time_ns in stages.items()}
    stage, num_steps = slow_stage(stages), len(steps.numbers)
    if stage is None:
        return SlowRank(
            verdict="none",
            rank=None,
            traced=None,
            what=f"no rank is slow: none is late by {MIN_SHARE:.0%} of the step in {MIN_PERSISTENCE:.0%} of "
            f"{num_steps} steps",
            sure="high" if num_steps >= CERTAIN_STEPS else "low",
            num_steps=num_steps,
            disproved_by=DISPROVED_BY["none"],
            evidence=evidence,
        )
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


def _us(nanoseconds: float) -> float:
    return round(nanoseconds / 1000, 3)
