"""Who waits, how long, and for whom? From durations alone: no clock is compared with another.

        rank 0   [#### wait ####|transfer]            wait = own duration - the shortest duration in the group
        rank 1          [ wait  |transfer]
        rank 2                  [transfer]   <- came last: the others waited for it

A rank that came last may itself have been held up just before, in another group. Then it is a victim, and what the
others waited for it is passed on to the rank it waited for:

        rank 0   ........................[ A ]            late by 40 ms on its own: the cause
        rank 1   [ A: waits 40 ms for rank 0 ][ B ]       late in B only because of A: the victim
        rank 3   [ B: waits 40 ms for rank 1      ]
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headrace.traces.kernel_names import TELLS_ARRIVAL
from headrace.traces.median_of_others import medians_of_others
from headrace.traces.pairing import Instance

RankStep: TypeAlias = tuple[int, int | None]

MIN_LEAD_NS, MIN_LEAD_SHARE = 5_000, 0.01
"""Shortest by more than 5 us and 1 %: below that nobody came last, kernels differ by so much on their own."""

SHORT_WAIT = 0.1
"""Whoever waits less than a tenth of the longest wait came last too: two late ranks share the blame."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWaits:
    """What one rank waited, over all steps, nanoseconds."""

    rank: int
    wait_ns: int
    waited_for: dict[int, int]
    """By the rank that was waited for; it need not have been traced."""
    by_step: dict[int | None, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """All waits of a job, and what the verdict needs of them."""

    of_rank: tuple[RankWaits, ...]
    blame_ns: dict[RankStep, int]
    """Sum of the waits of all others where this rank was the shortest."""
    lateness_ns: dict[RankStep, int]
    """By how much this rank was later than half of its group, victims cleared; symmetric collectives only."""
    num_telling: int
    """Collectives that lateness could be read from: symmetric, and with every rank of their group traced."""


def by_durations(instances: Sequence[Instance], stage_of: Mapping[int, int | None]) -> Waits:
    """Waits from paired collectives. `stage_of`: within a group that spans pipeline stages ranks are compared to their
    own stage, since stages differ by design."""
    total: defaultdict[int, int] = defaultdict(int)
    waited_for: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    per_step: defaultdict[int, defaultdict[int | None, int]] = defaultdict(lambda: defaultdict(int))
    blame: defaultdict[RankStep, int] = defaultdict(int)
    for instance in instances:
        waits = waits_in(instance)
        last = shortest(instance)
        for rank, wait_ns in waits.items():
            total[rank] += wait_ns
            per_step[rank][instance.step] += wait_ns
            if last is not None and rank != last:
                waited_for[rank][last] += wait_ns
        if last is not None:
            blame[last, instance.step] += sum(waits.values())
    of_rank = tuple(
        RankWaits(rank=rank, wait_ns=wait_ns, waited_for=dict(waited_for[rank]), by_step=dict(per_step[rank]))
        for rank, wait_ns in sorted(total.items())
    )
    telling = [instance for instance in instances if instance.is_complete and instance.kind in TELLS_ARRIVAL]
    return Waits(
        of_rank=of_rank,
        blame_ns=dict(blame),
        lateness_ns=_lateness(telling, stage_of),
        num_telling=len(telling),
    )


def waits_in(instance: Instance) -> dict[int, int]:
    """rank -> own duration - the shortest duration."""
    least = min(part.duration_ns for _, part in instance.members)
    return {rank: part.duration_ns - least for rank, part in instance.members}


def shortest(instance: Instance) -> int | None:
    """The rank that was clearly the shortest; None when two are as short as each other."""
    ordered = sorted((part.duration_ns, rank) for rank, part in instance.members)
    (first, rank), (second, _) = ordered[0], ordered[1]
    return rank if second - first > max(MIN_LEAD_NS, MIN_LEAD_SHARE * first) else None


def _lateness(telling: Sequence[Instance], stage_of: Mapping[int, int | None]) -> dict[RankStep, int]:
    """Walks the collectives in an order that agrees with every rank's own, and passes a victim's lateness on."""
    lateness: defaultdict[RankStep, int] = defaultdict(int)
    causes: dict[int, dict[int, float]] = {}
    held_up: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    """Per rank: (collective, how long it waited there), in its own order."""
    seen_group: dict[tuple[int, tuple[int, ...], str], int] = {}
    """Per rank and group: how many entries of `held_up` were there at the group's last collective."""
    for number in _in_causal_order(telling):
        instance = telling[number]
        stages = _split_by_stage(waits_in(instance), stage_of)
        own = {rank: wait_ns for stage in stages for rank, wait_ns in stage.items()}
        late = {rank: late_ns for stage in stages for rank, late_ns in _late_ranks(stage).items()}
        credit: defaultdict[int, float] = defaultdict(float)
        for rank, late_ns in late.items():
            since = seen_group.get((rank, instance.group.ranks, instance.group.name), 0)
            for cause, share_ns in _pass_on(rank, late_ns, held_up[rank][since:], causes).items():
                credit[cause] += share_ns
        whole = sum(credit.values())
        causes[number] = {rank: share_ns / whole for rank, share_ns in credit.items()} if whole else {}
        for rank, share_ns in credit.items():
            lateness[rank, instance.step] += round(share_ns)
        for rank, wait_ns in own.items():
            held_up[rank].append((number, wait_ns))
            seen_group[rank, instance.group.ranks, instance.group.name] = len(held_up[rank])
    return dict(lateness)


def _split_by_stage(waits: dict[int, int], stage_of: Mapping[int, int | None]) -> list[dict[int, int]]:
    """Waits beyond the least of the own stage, stage by stage; one part where the group lies in a single stage or a
    stage is unknown."""
    parts: defaultdict[int | None, dict[int, int]] = defaultdict(dict)
    for rank, wait_ns in waits.items():
        parts[stage_of.get(rank)][rank] = wait_ns
    if None in parts:
        return [waits]
    return [{rank: wait_ns - min(own.values()) for rank, wait_ns in own.items()} for own in parts.values()]


def _late_ranks(waits: dict[int, int]) -> dict[int, int]:
    """The ranks that came last -> by how much they were later than half of the others."""
    longest = max(waits.values())
    found = {}
    for rank, others_ns in medians_of_others(waits).items():
        behind_ns = round(others_ns) - waits[rank]
        if waits[rank] <= SHORT_WAIT * longest and behind_ns > MIN_LEAD_NS:
            found[rank] = behind_ns
    return found


def _pass_on(
    rank: int, late_ns: int, held_up: list[tuple[int, int]], causes: Mapping[int, Mapping[int, float]]
) -> dict[int, float]:
    """Share `late_ns` between the rank itself and those it had waited for since its group last met."""
    blamed = [(causes[number], wait_ns) for number, wait_ns in held_up if causes.get(number)]
    waited_ns = sum(wait_ns for _, wait_ns in blamed)
    passed_ns = min(late_ns, waited_ns)
    shares: defaultdict[int, float] = defaultdict(float)
    shares[rank] += late_ns - passed_ns
    for cause, wait_ns in blamed:
        for other, part in cause.items():
            shares[other] += passed_ns * wait_ns / waited_ns * part if waited_ns else 0.0
    return {other: share_ns for other, share_ns in shares.items() if share_ns > 0}


def _in_causal_order(instances: Sequence[Instance]) -> list[int]:
    """Numbers of the instances, each after all that its members ran before it by their own clocks. Pairs that
    contradict each other (a wrong match) are taken as they come."""
    own: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, instance in enumerate(instances):
        for rank, part in instance.members:
            own[rank].append((part.start_ns, number))
    after: defaultdict[int, set[int]] = defaultdict(set)
    before = dict.fromkeys(range(len(instances)), 0)
    for sequence in own.values():
        ordered = [number for _, number in sorted(sequence)]
        for first, second in itertools.pairwise(ordered):
            if second not in after[first]:
                after[first].add(second)
                before[second] += 1
    ready = deque(number for number, count in before.items() if count == 0)
    order: list[int] = []
    done: set[int] = set()
    while len(order) < len(instances):
        if not ready:
            ready.append(next(number for number in before if number not in done))
        number = ready.popleft()
        if number in done:
            continue
        done.add(number)
        order.append(number)
        for following in sorted(after[number]):
            before[following] -= 1
            if before[following] == 0:
                ready.append(following)
    return order
