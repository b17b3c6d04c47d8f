"""Is one link slow? Only links of one kind are compared: HCCS with HCCS, PCIe with PCIe, RDMA with RDMA.

        bandwidth = bytes / transfer time (GB/s, 1e9)        slow: below 0.8 x the median of its kind

The median, not the mean: one slow link of seven would pull the mean down with it. A link that carried less than 1 MB is
shown but not judged (40 bytes give 0.02 GB/s on any hardware), nor is one without at least two others of its kind.
A link whose bytes went in much smaller packets than its peers' is told apart: that is the program, not the link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from headrace.traces.timeline import LinkLoad, RankTrace

SLOW_BELOW = 0.8
MIN_JUDGED_BYTES = 1e6
MIN_LINKS = 3
SMALLER_PACKETS = 0.5
"""Mean packet of the sending rank against the median of the other ranks over the same transport."""
SMALLER_TRANSFER = 0.25
"""Bytes of the link against the median of its kind: start-up times weigh more in little traffic."""

LinkVerdict: TypeAlias = Literal["slow", "small_packets", "none", "undecidable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One link over all steps."""

    src: int
    dst: int
    transport: str
    num_bytes: float
    bandwidth_gb_s: float
    expected_gb_s: float | None
    """Median of its kind; None when there are too few to compare."""
    slow: bool
    judged: bool
    ranks_are_local: bool = False
    group: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLink:
    """The verdict on all links."""

    verdict: LinkVerdict
    what: str
    links: tuple[Link, ...]
    disproved_by: str


def judge_slow_link(traces: Sequence[RankTrace]) -> SlowLink:
    """Apply the rule to everything the ranks sent."""
    links = _links(load for trace in traces for load in trace.links)
    slow = [link for link in links if link.slow]
    if not links:
        return SlowLink(
            verdict="undecidable",
            what="cannot say whether a link is slow: the traces tell of no single link",
            links=(),
            disproved_by="a communication matrix (Ascend, profiler level 1)",
        )
    if not slow:
        judged = sum(link.judged for link in links)
        return SlowLink(
            verdict="none" if judged else "undecidable",
            what=f"no link is slow: {judged} of {len(links)} could be judged, none is below {SLOW_BELOW} of its kind"
            if judged
            else "cannot say whether a link is slow: none carried enough, or has others of its kind beside it",
            links=links,
            disproved_by="the same links under larger transfers",
        )
    small = all(_has_small_packets(link, links, traces) for link in slow)
    names = ", ".join(f"{link.src}->{link.dst} ({link.transport}, {_ratio(link):.0%})" for link in slow[:5])
    return SlowLink(
        verdict="small_packets" if small else "slow",
        what=f"{'small packets, not the link: ' if small else ''}{names} of the bandwidth of its kind",
        links=links,
        disproved_by="larger buckets: if the link keeps up then, it was the packets"
        if small
        else "swap the cable or port: if the pair of ranks stays slow, it is not the link",
    )


def _links(loads: Iterable[LinkLoad]) -> tuple[Link, ...]:
    total: defaultdict[tuple[str, int, int, bool, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for load in loads:
        own = total[
            load.transport, load.src, load.dst, load.ranks_are_local, load.group if load.ranks_are_local else ""
        ]
        own[0] += load.num_bytes
        own[1] += load.time_ns
    speed = {key: num_bytes / time_ns for key, (num_bytes, time_ns) in total.items() if time_ns > 0}
    large_enough = {key for key in speed if total[key][0] >= MIN_JUDGED_BYTES}
    expected = {}
    for transport in {key[0] for key in speed}:
        own = [speed[key] for key in large_enough if key[0] == transport]
        expected[transport] = median(own) if len(own) >= MIN_LINKS else None
    found = []
    for key, bandwidth in sorted(speed.items()):
        transport, src, dst, local, group = key
        reference = expected[transport]
        judged = reference is not None and key in large_enough
        found.append(
            Link(
                src=src,
                dst=dst,
                transport=transport,
                num_bytes=total[key][0],
                bandwidth_gb_s=bandwidth,
                expected_gb_s=reference,
                slow=judged and reference is not None and bandwidth < SLOW_BELOW * reference,
                judged=judged,
                ranks_are_local=local,
                group=group,
            )
        )
    return tuple(found)


def _has_small_packets(link: Link, links: Sequence[Link], traces: Sequence[RankTrace]) -> bool:
    """Would packets explain it? Its sender cut them smaller than the others did, or little went over it at all."""
    peers = [other.num_bytes for other in links if other.transport == link.transport and other.judged]
    if link.num_bytes < SMALLER_TRANSFER * median(peers):
        return True
    own: list[float] = []
    others: list[float] = []
    for trace in traces:
        sizes = [packets.mean_bytes for packets in trace.packets if packets.transport == link.transport]
        (own if trace.rank == link.src else others).extend(sizes)
    return bool(own and others) and own[0] < SMALLER_PACKETS * median(others)


def _ratio(link: Link) -> float:
    return link.bandwidth_gb_s / link.expected_gb_s if link.expected_gb_s else 0.0
