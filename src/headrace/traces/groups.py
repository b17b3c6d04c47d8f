"""Who takes part in a collective? By what the trace says, by what the user says, or not at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.traces.timeline import Collective, Group, RankTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedCollectives:
    """The collectives of one group, by traced rank, in the order each rank ran them."""

    group: Group
    """Its ranks are () when only the operations' names are known (Ascend without metadata)."""
    by_rank: dict[int, tuple[Collective, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ungrouped:
    """Collectives that cannot be paired, and why."""

    rank: int
    count: int
    why: str


def parse_groups(text: str) -> tuple[Group, ...]:
    """`"0,1;2,3"` -> two groups. Raises ConfigError for anything else, and for a rank in two of them."""
    groups: list[Group] = []
    seen: set[int] = set()
    for part in text.split(";"):
        try:
            ranks = tuple(sorted(int(number) for number in part.split(",")))
        except ValueError:
            raise ConfigError(f'--groups takes ranks like "0,1;2,3", got {text!r}') from None
        if len(set(ranks)) < len(ranks) or seen & set(ranks) or min(ranks) < 0:
            raise ConfigError(
                f"--groups: every rank may be in one group only, got {text!r}: without names in the trace, "
                "a collective of a rank in two groups could belong to either"
            )
        seen |= set(ranks)
        groups.append(Group(name="--groups", ranks=ranks))
    return tuple(groups)


def group_collectives(
    traces: Sequence[RankTrace], named: Sequence[Group]
) -> tuple[tuple[GroupedCollectives, ...], tuple[Ungrouped, ...]]:
    """Sort every rank's collectives by group. Groups with a single rank have nobody to wait for and are left out."""
    declared = {group.ranks for trace in traces for group in trace.groups if len(group.ranks) > 1}
    found: defaultdict[Group, dict[int, list[Collective]]] = defaultdict(dict)
    ungrouped: list[Ungrouped] = []
    for trace in traces:
        assert trace.rank is not None
        homeless = 0
        for collective in trace.collectives:
            group = _group_of(collective, trace.rank, named, declared)
            if group is None:
                homeless += 1
            elif len(group.ranks) != 1:
                found[group].setdefault(trace.rank, []).append(collective)
        if homeless:
            ungrouped.append(Ungrouped(rank=trace.rank, count=homeless, why=_why(trace.rank, named, declared)))
    grouped = (
        GroupedCollectives(group=group, by_rank={rank: tuple(own) for rank, own in sorted(by_rank.items())})
        for group, by_rank in found.items()
    )
    return tuple(sorted(grouped, key=lambda one: (one.group.ranks, one.group.name))), tuple(ungrouped)


def _group_of(
    collective: Collective, rank: int, named: Sequence[Group], declared: set[tuple[int, ...]]
) -> Group | None:
    if collective.group is not None:
        return collective.group
    if collective.key is not None:  # the operation's name holds the group's id, only its ranks are unknown
        return Group(name=_group_id(collective.key), ranks=())
    own = [group for group in named if rank in group.ranks]
    if own:
        return own[0]
    fitting = [ranks for ranks in declared if rank in ranks]
    return Group(name="", ranks=fitting[0]) if len(fitting) == 1 else None


def _group_id(key: str) -> str:
    name, _, group_id = key.partition("@")
    return group_id or name.partition("__")[2].partition("_")[0]


def _why(rank: int, named: Iterable[Group], declared: set[tuple[int, ...]]) -> str:
    fitting = sum(rank in ranks for ranks in declared)
    if any(True for _ in named):
        return f"rank {rank} is in none of --groups"
    if fitting > 1:
        return f"the trace declares {fitting} groups with rank {rank} and no collective says which it is of"
    return 'the trace names no group; give --groups "0,1;2,3" if you know them'
