"""Which collective on this rank is which on that one? Without a common clock, and with parts of the record missing.

In order of trust:
  name       Ascend's operations carry their number in their name
  sequence   torch's `Seq` of the group, if it holds: kinds, sizes and steps must agree wherever two ranks share a
             number (it may be doubled or counted per process, pytorch PR#191990)
  order      the n-th in the same step, if kind, size and dtype agree; otherwise the lists are aligned anew

             rank 0   A B B A | A B B A
             rank 1       B A | A B B A      cut at the window's edge: aligned from the right, two stay unmatched

Where an alignment is ambiguous (equal collectives in a row, one missing) the right one is known by its ends: members
of one collective leave it together, so end(rank 1) - end(rank 0) is nearly the same for every true pair.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from statistics import median
from typing import Literal, TypeAlias

from headrace.traces.groups import GroupedCollectives
from headrace.traces.timeline import Collective, Group

Method: TypeAlias = Literal["name", "sequence", "order"]
Pairs: TypeAlias = dict[int, int]
"""Index in the reference rank's list -> index in this rank's list."""

MIN_SHARED = 0.5
"""Numbers that two ranks share, as a part of the shorter list; below it the numbers mean different things."""

STEADIER = 0.5
"""One pairing beats another when its ends scatter less than this times as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One collective with all that was recorded of it: two or more ranks of one group."""

    group: Group
    kind: str
    step: int | None
    members: tuple[tuple[int, Collective], ...]
    """(rank, its part), by rank."""

    @property
    def is_complete(self) -> bool:
        """Every rank of the group was traced and matched."""
        return len(self.group.ranks) == len(self.members)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedGroup:
    """What became of one group's collectives."""

    group: Group
    traced: tuple[int, ...]
    method: Method
    instances: tuple[Instance, ...]
    unmatched: tuple[tuple[int, int], ...]
    """(rank, how many of its collectives have no counterpart on any other traced rank)"""


def pair(grouped: GroupedCollectives) -> PairedGroup | None:
    """Pair one group's collectives; None when fewer than two of its ranks were traced."""
    lists = grouped.by_rank
    if len(lists) < 2:
        return None
    reference = max(lists, key=lambda rank: (len(lists[rank]), -rank))
    method: Method
    if all(collective.key is not None for own in lists.values() for collective in own):
        method, pairs = "name", {rank: _by_identity(lists[reference], own, _name) for rank, own in lists.items()}
    else:
        method, pairs = _by_sequence_or_order(lists, reference)
    members: list[list[tuple[int, Collective]]] = [[] for _ in lists[reference]]
    for rank in sorted(lists):
        for place, index in pairs[rank].items():
            members[place].append((rank, lists[rank][index]))
    instances = tuple(
        Instance(group=grouped.group, kind=own[0][1].kind, step=own[0][1].step, members=tuple(own))
        for own in members
        if len(own) > 1
    )
    matched = Counter(rank for instance in instances for rank, _ in instance.members)
    unmatched = tuple((rank, len(own) - matched[rank]) for rank, own in lists.items() if len(own) > matched[rank])
    return PairedGroup(
        group=grouped.group, traced=tuple(sorted(lists)), method=method, instances=instances, unmatched=unmatched
    )


def _by_sequence_or_order(lists: Mapping[int, Sequence[Collective]], reference: int) -> tuple[Method, dict[int, Pairs]]:
    by_order = {rank: _by_order(lists[reference], own) for rank, own in lists.items()}
    if any(collective.sequence is None for own in lists.values() for collective in own):
        return "order", by_order
    by_sequence = {rank: _by_identity(lists[reference], own, _sequence) for rank, own in lists.items()}
    for rank, pairs in by_sequence.items():
        if not _holds(lists[reference], lists[rank], pairs):
            return "order", by_order
        steadier = STEADIER * _scatter(lists[reference], lists[rank], pairs)
        if pairs != by_order[rank] and _scatter(lists[reference], lists[rank], by_order[rank]) < steadier:
            return "order", by_order
    return "sequence", by_sequence


def _name(collective: Collective) -> Hashable:
    return collective.step, collective.key


def _sequence(collective: Collective) -> Hashable:
    return collective.sequence


def _by_identity(
    reference: Sequence[Collective], own: Sequence[Collective], identity: Callable[[Collective], Hashable]
) -> Pairs:
    """Equal identities belong together; the second use of one belongs to the second use there (coalesced calls)."""
    places = {key: place for place, key in enumerate(_numbered(reference, identity))}
    found = ((places.get(key), index) for index, key in enumerate(_numbered(own, identity)))
    return {place: index for place, index in found if place is not None}


def _numbered(
    collectives: Sequence[Collective], identity: Callable[[Collective], Hashable]
) -> Iterator[tuple[Hashable, int]]:
    uses: Counter[Hashable] = Counter()
    for collective in collectives:
        key = identity(collective)
        yield key, uses[key]
        uses[key] += 1


def _holds(reference: Sequence[Collective], own: Sequence[Collective], pairs: Pairs) -> bool:
    """Do shared numbers mean the same operation? Enough are shared, and no kind, size or step contradicts."""
    if len(pairs) < MIN_SHARED * min(len(reference), len(own)):
        return False
    return all(
        reference[place].signature == own[index].signature and reference[place].step == own[index].step
        for place, index in pairs.items()
    )


def _by_order(reference: Sequence[Collective], own: Sequence[Collective]) -> Pairs:
    """Step by step where both ranks know their steps. Steps that agree as they are come first: from their ends the
    offset of the clocks is known, and with it the right place in steps that do not."""
    places, indices = _by_step(reference), _by_step(own)
    pairs: Pairs = {}
    uneven = []
    for step, theirs in places.items():
        mine = indices.get(step, [])
        if [reference[place].signature for place in theirs] == [own[index].signature for index in mine]:
            pairs.update(zip(theirs, mine, strict=True))
        elif mine:
            uneven.append((theirs, mine))
    offset_ns = median(_end_offsets(reference, own, pairs)) if pairs else None
    for theirs, mine in uneven:
        pairs.update(_align(reference, own, theirs, mine, offset_ns))
    return pairs


def _align(
    reference: Sequence[Collective],
    own: Sequence[Collective],
    theirs: list[int],
    mine: list[int],
    offset_ns: float | None,
) -> Pairs:
    """Align two lists that differ. Of several shifts that fit equally well, the one whose ends agree clearly best; if
    none does, nobody can tell, and nothing is paired."""
    left = [reference[place].signature for place in theirs]
    right = [own[index].signature for index in mine]
    fitting: list[tuple[int, float, Pairs]] = []
    for shift in range(-len(right) + 1, len(left)):
        overlap = range(max(0, shift), min(len(left), shift + len(right)))
        if all(left[place] == right[place - shift] for place in overlap):
            pairs = {theirs[place]: mine[place - shift] for place in overlap}
            fitting.append((len(pairs), _disagreement(reference, own, pairs, offset_ns), pairs))
    most = max((size for size, _, _ in fitting), default=0)
    if most >= MIN_SHARED * min(len(left), len(right)):
        best, *others = sorted((fit for fit in fitting if fit[0] == most), key=lambda fit: fit[1])
        is_clear = not others or best[1] < STEADIER * others[0][1]
        return best[2] if is_clear else {}
    # Something is missing in the middle: the longest common blocks.
    blocks = SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
    return {theirs[block.a + i]: mine[block.b + i] for block in blocks for i in range(block.size)}


def _disagreement(
    reference: Sequence[Collective], own: Sequence[Collective], pairs: Pairs, offset_ns: float | None
) -> float:
    """How far the ends are from one common offset: the known one, or else their own median."""
    offsets = _end_offsets(reference, own, pairs)
    centre = median(offsets) if offset_ns is None else offset_ns
    return median(abs(offset - centre) for offset in offsets)


def _scatter(reference: Sequence[Collective], own: Sequence[Collective], pairs: Pairs) -> float:
    return _disagreement(reference, own, pairs, None) if pairs else float("inf")


def _end_offsets(reference: Sequence[Collective], own: Sequence[Collective], pairs: Pairs) -> list[int]:
    return [own[index].end_ns - reference[place].end_ns for place, index in pairs.items()]


def _by_step(collectives: Sequence[Collective]) -> dict[int | None, list[int]]:
    steps: defaultdict[int | None, list[int]] = defaultdict(list)
    for index, collective in enumerate(collectives):
        steps[collective.step].append(index)
    return steps
