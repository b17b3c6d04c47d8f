"""Waits that name whom they were for (Ascend's Notify_Wait): they can convict a rank nobody traced.

rank 0   |== waits for 1: 6 ms ==|
         |================ waits for 5: 79 ms ================|      planes wait side by side
rank 1   |=============== waits for 5: 73 ms ===============|
                            => 5 is late, 1 only passes it on
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from headrace.traces.timeline import RankTrace
from headrace.traces.waits import RankStep, RankWaits

PASSES_ON = 0.5
"""A traced peer that itself waited for somebody at least half as long as it was waited for only passes it on."""


def waits_by_peer(traces: Sequence[RankTrace]) -> tuple[RankWaits, ...]:
    """Per rank: whom it waited for, and how long in all. The planes of one operation wait side by side, so each
    operation counts with its longest wait."""
    result = []
    for trace in traces:
        if trace.rank is None or not trace.peer_waits:
            continue
        longest: defaultdict[tuple[int | None, str], int] = defaultdict(int)
        waited_for: defaultdict[int, int] = defaultdict(int)
        for wait in trace.peer_waits:
            operation = (wait.step, wait.operation)
            longest[operation] = max(longest[operation], wait.wait_ns)
            waited_for[wait.peer] += wait.wait_ns
        by_step: defaultdict[int | None, int] = defaultdict(int)
        for (step, _), wait_ns in longest.items():
            by_step[step] += wait_ns
        waits = RankWaits(
            rank=trace.rank, wait_ns=sum(longest.values()), waited_for=dict(waited_for), by_step=dict(by_step)
        )
        result.append(waits)
    return tuple(result)


def lateness_by_peer(traces: Sequence[RankTrace]) -> dict[RankStep, int]:
    """(peer, step) -> by how much the peer was later than the others: the longest wait that led to it - the median
    wait for all other peers, median over the ranks that waited for it."""
    own: dict[int, dict[int | None, dict[int, int]]] = {}
    for trace in traces:
        if trace.rank is not None and trace.peer_waits:
            own[trace.rank] = _per_step(trace)
    extra: defaultdict[RankStep, list[int]] = defaultdict(list)
    for rank, steps in own.items():
        for step, waited in steps.items():
            root = _root(rank, step, own)
            if root is not None:
                longest, *others = sorted(waited.values(), reverse=True)
                extra[root, step].append(longest - round(median(others) if others else 0))
    return {key: round(median(found)) for key, found in extra.items() if median(found) > 0}


def _per_step(trace: RankTrace) -> dict[int | None, dict[int, int]]:
    steps: defaultdict[int | None, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    for wait in trace.peer_waits:
        steps[wait.step][wait.peer] += wait.wait_ns
    return {step: dict(waited) for step, waited in steps.items()}


def _root(rank: int, step: int | None, own: dict[int, dict[int | None, dict[int, int]]]) -> int | None:
    """Follow the longest waits from this rank to the one that waited for nobody, or was not traced."""
    visited = {rank}
    here, waited_ns, root = rank, 0, None
    while True:
        waited = {peer: wait_ns for peer, wait_ns in own.get(here, {}).get(step, {}).items() if peer not in visited}
        if not waited:
            return root
        peer = max(waited, key=lambda candidate: waited[candidate])
        if waited[peer] < PASSES_ON * waited_ns:
            return root
        visited.add(peer)
        here, waited_ns, root = peer, waited[peer], peer
