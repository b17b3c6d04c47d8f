"""A rank is late: why? From what it did longer than the others, and from who is late beside it.

    card    it computes longer, or nothing seen on its host explains the delay
    host    its device idles longer (launching, loading), or all ranks of its host are late

On a CPU job there is no card, and the host is the device:

    card    its operators take longer, by as much in every step: a slower core, or more work
    host    its thread has gaps between operators (Python, sleep, I/O); or its operators take longer now and then: other
            processes have taken its core, which a profile shows as operators that take longer

    rank 0   [ops][ops][ops] ......... [ops]          [ops][ops]          [ops]
    rank 1   [ops][ops][ops] | waits | [ops]          [ops][   ops   ][ops]
                             ^ a gap on rank 0                ^ an operator that takes longer on rank 1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.traces.step_times import Excess
from headrace.traces.timeline import RankTrace

Culprit: TypeAlias = Literal["card", "host"]

EXPLAINS = 0.5
"""A cause has to cover half of the delay."""

SWAP_CARD = (
    "swap the card or move the rank to another host: if the delay stays with the rank's number, its work is "
    "to blame; if it stays with the host, the host is"
)
MOVE_RANK = (
    "pin the rank to other cores or run it on another host: if the delay follows the rank, it is its card or "
    "its work; if launches stay late with nothing else on the host, it is the program"
)
MOVE_WORK = (
    "give the rank other cores, or exchange its batches with another rank's: if the delay follows the work, the rank "
    "has more of it; if it stays with the cores, they are slower"
)
FREE_CORES = (
    "trace again with nothing else on the rank's cores (pin each rank to cores of its own): if the rank is still late, "
    "it has more work or slower cores; if not, other processes took its time"
)
LOOK_INTO_GAP = (
    "look at what the rank's thread does between operators (profile with_stack=True) and trace again with nothing else "
    "on its cores: if the gap stays, it is the program; if not, other processes took its time"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """What is to blame, in words, and what would disprove it."""

    verdict: Culprit
    why: str
    disproved_by: str
    explained: bool = True
    """The rank did something longer; else only the others' waits speak."""


def find_cause(
    traces: Sequence[RankTrace], rank: int, late: set[int], late_ns: float, excess: Excess | None, *, is_steady: bool
) -> Cause:
    """Why `rank` is late by `late_ns` per step. `late`: all late ranks; `excess`: None where it was not traced."""
    host = _whole_host(traces, late)
    own = next((trace for trace in traces if trace.rank == rank), None)
    others = "the others" if all(trace.stage is None for trace in traces) else "the others of its stage"
    if own is not None and own.device == "cpu":
        cause = _on_cpu(late_ns / 1000, excess, others, is_steady=is_steady)
    else:
        cause = _on_device(late_ns / 1000, excess, others)
    if host is None:
        return cause
    return _host(f"so are all traced ranks of host {host}", MOVE_RANK)


def _on_device(late_us: float, excess: Excess | None, others: str) -> Cause:
    if excess is None:
        return _card("card or host cannot be told apart from outside", explained=False)
    if _explains(excess.computing_us, late_us) and not _idles_more(excess):
        return _card(f"it computes {_ms(excess.computing_us)} longer than {others}")
    if _explains(excess.data_us, late_us):
        return _host(f"it waits {_ms(excess.data_us)} longer for its data than {others}", MOVE_RANK)
    if _explains(excess.idle_us, late_us):
        return _host(f"its device is idle {_ms(excess.idle_us)} longer than that of {others}", MOVE_RANK)
    return _card("neither computing nor idle time of its own explains it", explained=False)


def _on_cpu(late_us: float, excess: Excess | None, others: str, *, is_steady: bool) -> Cause:
    if excess is None:
        return _host("what its host did cannot be told from outside", FREE_CORES, explained=False)
    if _explains(excess.data_us, late_us):
        return _host(f"it waits {_ms(excess.data_us)} longer for its data than {others}", LOOK_INTO_GAP)
    if _explains(excess.idle_us, late_us) and _idles_more(excess):
        return _host(f"its thread runs no operator for {_ms(excess.idle_us)} longer than {others}", LOOK_INTO_GAP)
    if not _explains(excess.computing_us, late_us):
        return _host("neither its operators nor the gaps between them explain it alone", FREE_CORES, explained=False)
    longer = f"its operators take {_ms(excess.computing_us)} longer than those of {others}"
    if is_steady:
        return _card(f"{longer}: a slower core, or more work", MOVE_WORK)
    return _host(
        f"{longer}, but not by as much in every step: other processes on its cores, or uneven work", FREE_CORES
    )


def _idles_more(excess: Excess) -> bool:
    return (excess.idle_us or 0.0) > (excess.computing_us or 0.0)


def _explains(excess_us: float | None, late_us: float) -> bool:
    return excess_us is not None and excess_us >= EXPLAINS * late_us


def _ms(microseconds: float | None) -> str:
    return f"{(microseconds or 0) / 1000:.1f} ms"


def _card(why: str, disproved_by: str = SWAP_CARD, *, explained: bool = True) -> Cause:
    return Cause(verdict="card", why=why, disproved_by=disproved_by, explained=explained)


def _host(why: str, disproved_by: str, *, explained: bool = True) -> Cause:
    return Cause(verdict="host", why=why, disproved_by=disproved_by, explained=explained)


def _whole_host(traces: Sequence[RankTrace], late: set[int]) -> str | None:
    """The host whose traced ranks are exactly the late ones, if it has two or more of them and is not the only host."""
    hosts: defaultdict[str, set[int]] = defaultdict(set)
    for trace in traces:
        if trace.host is not None and trace.rank is not None:
            hosts[trace.host].add(trace.rank)
    if len(hosts) < 2:
        return None
    return next((host for host, ranks in hosts.items() if len(ranks) > 1 and ranks == late), None)
