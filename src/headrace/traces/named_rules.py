"""Rules of published guides, by name, beside our own verdict; a flag says whether the premises of each hold here.

  wait_ratio_spread_0.2        wait / (wait + transfer) per rank; spread over ranks > 0.2: who waits least is slow
  shortest_communication_time  the rank with the least time in communication is the slow card
  bandwidth_0.8_of_maximum     a transport below 0.8 x its nominal maximum is slow
They are quoted, not followed. The first looks only at what Ascend calls the master plane: 73 of 79 ms of a real wait
sat on another plane and vanished into `Idle`. All of them need every rank of the group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.measure.bandwidth import EXPECTED_SHARE, NOMINAL_GB_PER_S
from headrace.traces.slow_link import Link
from headrace.traces.timeline import RankTrace
from headrace.traces.waits import Waits

MIN_SPREAD = 0.2
MAX_IDLE_SHARE = 0.5
"""Above it the wait ratio misses most of the waiting."""
MIN_TRANSIT_SHARE = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRule:
    """What a published rule says about this job."""

    name: str
    valid: bool
    why_not: str
    """Empty when valid."""
    accuses: int | None
    """The rank it names; None when it names nobody (or rules on links)."""
    value: float | None
    threshold: float | None
    unit: str
    detail: dict[str, float] = field(default_factory=dict)


def apply_named_rules(
    traces: Sequence[RankTrace], waits: Waits, links: Sequence[Link], world_size: int | None
) -> tuple[NamedRule, ...]:
    """All rules, valid or not."""
    missing = _missing(traces, world_size)
    return (_wait_ratio(traces, waits, missing), _shortest_communication(traces, missing), _bandwidth(traces, links))


def _missing(traces: Sequence[RankTrace], world_size: int | None) -> str:
    if len(traces) < 2:
        return "needs more than one rank"
    if world_size is not None and len(traces) < world_size:
        return f"needs all ranks, {len(traces)} of {world_size} were traced"
    return ""


def _wait_ratio(traces: Sequence[RankTrace], waits: Waits, missing: str) -> NamedRule:
    """Ascend publishes wait and transfer; elsewhere wait is own - shortest, transfer the rest."""
    ratios: dict[int, float] = {}
    doubts = [missing] if missing else []
    for trace in traces:
        times = trace.wait_times
        if trace.rank is None or times is None or times.wait_ns + times.transit_ns == 0:
            continue
        ratios[trace.rank] = times.wait_ns / (times.wait_ns + times.transit_ns)
        if times.idle_ns > MAX_IDLE_SHARE * times.elapse_ns:
            doubts.append(
                f"rank {trace.rank}: {times.idle_ns / times.elapse_ns:.0%} of its time is neither wait nor transfer"
            )
        if times.transit_ns < MIN_TRANSIT_SHARE * times.elapse_ns:
            doubts.append(f"rank {trace.rank}: no transfer to speak of")
    if not ratios:
        spent = {trace.rank: sum(part.duration_ns for part in trace.collectives) for trace in traces}
        waited = {own.rank: own.wait_ns for own in waits.of_rank}
        ratios = {
            rank: waited[rank] / own for rank, own in spent.items() if rank is not None and rank in waited and own
        }
    spread = max(ratios.values()) - min(ratios.values()) if len(ratios) > 1 else None
    accused = min(ratios, key=lambda rank: ratios[rank]) if spread is not None and spread > MIN_SPREAD else None
    if spread is None and not doubts:
        doubts.append("no waits were recorded")
    return NamedRule(
        name="wait_ratio_spread_0.2",
        valid=not doubts,
        why_not="; ".join(doubts),
        accuses=accused,
        value=spread,
        threshold=MIN_SPREAD,
        unit="difference of ratios",
        detail={str(rank): round(ratio, 4) for rank, ratio in sorted(ratios.items())},
    )


def _shortest_communication(traces: Sequence[RankTrace], missing: str) -> NamedRule:
    spent: dict[int, float] = {}
    for trace in traces:
        own = [lanes.communication_ns for lanes in trace.lanes if lanes.communication_ns is not None]
        if trace.rank is not None and own:
            spent[trace.rank] = sum(own) / 1000
    stages = {trace.stage for trace in traces}
    why_not = missing or ("no communication was recorded" if len(spent) < 2 else "")
    if not why_not and len(stages) > 1:
        why_not = "stages of a pipeline communicate differently by design"
    accused = min(spent, key=lambda rank: spent[rank]) if len(spent) > 1 else None
    return NamedRule(
        name="shortest_communication_time",
        valid=not why_not,
        why_not=why_not,
        accuses=accused,
        value=spent[accused] if accused is not None else None,
        threshold=None,
        unit="us",
        detail={str(rank): round(us, 3) for rank, us in sorted(spent.items())},
    )


def _bandwidth(traces: Sequence[RankTrace], links: Sequence[Link]) -> NamedRule:
    """Per transport: all bytes over all transfer time, against the nominal maximum of the chip."""
    chip = next((trace.chip for trace in traces if trace.chip), "") or ""
    nominal = next((table for name, table in NOMINAL_GB_PER_S.items() if name in chip), None)
    total: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for link in links:
        total[link.transport][0] += link.num_bytes
        total[link.transport][1] += link.num_bytes / link.bandwidth_gb_s
    speed = {transport: num_bytes / time_ns for transport, (num_bytes, time_ns) in total.items() if time_ns > 0}
    small = sorted({own.transport for trace in traces for own in trace.packets if own.large_share < EXPECTED_SHARE})
    why_not = ""
    if not speed:
        why_not = "no link was recorded"
    elif nominal is None:
        why_not = f"the nominal bandwidths of the chip {chip or '(not named in the trace)'} are not known"
    elif small:
        why_not = f"small packets over {', '.join(small)}: they do not reach the maximum on a healthy link either"
    shares = {name: value / nominal[name] for name, value in speed.items() if nominal is not None and name in nominal}
    return NamedRule(
        name="bandwidth_0.8_of_maximum",
        valid=not why_not,
        why_not=why_not,
        accuses=None,
        value=min(shares.values()) if shares else None,
        threshold=EXPECTED_SHARE,
        unit="of the maximum",
        detail={name: round(value, 4) for name, value in sorted(speed.items())},
    )
