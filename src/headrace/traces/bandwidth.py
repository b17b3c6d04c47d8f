"""How fast were the collectives? Bandwidths as the nccl-tests define them (doc/PERFORMANCE.md).

algbw = S / t       S: the whole buffer; t: the shortest duration among the ranks, in which nobody waits any more
busbw = algbw x f   f: what each link carries of it, so that busbw can be held against the link's own speed
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from headrace.traces.kernel_names import bus_factor
from headrace.traces.pairing import Instance
from headrace.traces.timeline import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveSpeed:
    """One collective, seen over all its traced ranks."""

    instance: Instance
    num_bytes: int | None
    transfer_ns: int
    """The shortest duration: an upper bound of the transfer when not all ranks were traced."""
    longest_ns: int
    waited_ns: int
    """Sum over the ranks."""
    algbw_gb_s: float | None
    busbw_gb_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class KindOfCollective:
    """All collectives of one kind in one group."""

    group: Group
    kind: str
    count: int
    total_ns: int
    """Sum of the longest durations."""
    waited_ns: int
    median_busbw_gb_s: float | None


def speed_of(instance: Instance) -> CollectiveSpeed:
    """Bandwidth of one instance; None where size or group size is not known."""
    durations = [part.duration_ns for _, part in instance.members]
    sizes = {part.num_bytes for _, part in instance.members if part.num_bytes is not None}
    num_bytes = max(sizes) if sizes else None
    transfer_ns = min(durations)
    factor = bus_factor(instance.kind, len(instance.group.ranks))
    algbw = num_bytes / transfer_ns if num_bytes and transfer_ns > 0 else None
    return CollectiveSpeed(
        instance=instance,
        num_bytes=num_bytes,
        transfer_ns=transfer_ns,
        longest_ns=max(durations),
        waited_ns=sum(durations) - transfer_ns * len(durations),
        algbw_gb_s=algbw,
        busbw_gb_s=algbw * factor if algbw is not None and factor is not None else None,
    )


def by_kind(speeds: Sequence[CollectiveSpeed]) -> tuple[KindOfCollective, ...]:
    """Totals per group and kind, the most expensive first."""
    found: defaultdict[tuple[Group, str], list[CollectiveSpeed]] = defaultdict(list)
    for speed in speeds:
        found[speed.instance.group, speed.instance.kind].append(speed)
    kinds = []
    for (group, kind), own in found.items():
        rates = [speed.busbw_gb_s for speed in own if speed.busbw_gb_s is not None]
        kinds.append(
            KindOfCollective(
                group=group,
                kind=kind,
                count=len(own),
                total_ns=sum(speed.longest_ns for speed in own),
                waited_ns=sum(speed.waited_ns for speed in own),
                median_busbw_gb_s=median(rates) if rates else None,
            )
        )
    return tuple(sorted(kinds, key=lambda one: -one.total_ns))
