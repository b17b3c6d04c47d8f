"""How far apart are the ranks' clocks? Only for views that show several ranks on one axis; no verdict needs it.

All members leave a collective within microseconds of one another, however early they came. So the median of
end(rank) - end(reference) over many of them is the offset of the clocks: 79 us on one host, 1e9 us between hosts that
count from different boots. Point-to-point operations are left out: a sender leaves when it likes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from headrace.traces.kernel_names import EXPOSED
from headrace.traces.pairing import Instance

_ENDS_APART = frozenset({"send", "recv", "send_recv", EXPOSED})


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockOffset:
    """Add -offset_ns to this rank's times to put them on the reference rank's clock."""

    rank: int
    reference: int
    offset_ns: int
    num_collectives: int
    """0 when there is no common collective, then the offset is taken as 0."""
    spread_ns: int = 0
    """Median distance of the single collectives from the offset: how sure it is."""


def estimate_offsets(ranks: Iterable[int], instances: Iterable[Instance]) -> tuple[ClockOffset, ...]:
    """Offsets of all ranks to the lowest, along chains of groups where no collective joins them directly."""
    ends: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for instance in instances:
        if instance.kind in _ENDS_APART:
            continue
        (first, own), *others = instance.members
        for rank, part in others:
            ends[first, rank].append(part.end_ns - own.end_ns)
    ordered = sorted(ranks)
    if not ordered:
        return ()
    reference = ordered[0]
    known = {reference: ClockOffset(rank=reference, reference=reference, offset_ns=0, num_collectives=0)}
    frontier = [reference]
    while frontier:
        base = frontier.pop(0)
        for rank in ordered:
            pair, sign = ((base, rank), 1) if base < rank else ((rank, base), -1)
            if rank in known or pair not in ends:
                continue
            centre = median(ends[pair])
            known[rank] = ClockOffset(
                rank=rank,
                reference=reference,
                offset_ns=known[base].offset_ns + sign * round(centre),
                num_collectives=len(ends[pair]),
                spread_ns=round(median(abs(offset - centre) for offset in ends[pair])),
            )
            frontier.append(rank)
    alone = (
        ClockOffset(rank=rank, reference=reference, offset_ns=0, num_collectives=0)
        for rank in ordered
        if rank not in known
    )
    return tuple(sorted((*known.values(), *alone), key=lambda offset: offset.rank))
