"""Who wrote this trace? Rank, world and groups from the envelope of a Kineto trace, and ranks from file names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.traces.json_events import NOT_JSON
from headrace.traces.timeline import Group

MAX_RANKS = 1 << 20
"""No job is larger: a rank or world size beyond it is a broken number, and nothing is sized by it."""

_OF_WHAT = r"(?<!node)(?<!host)(?<!local)(?<!tp)(?<!pp)(?<!dp)(?<!cp)(?<!ep)"
"""A `node_rank0` is no rank of the job."""
_RANK_IN_NAME = re.compile(rf"(?:^|{_OF_WHAT}[-_.]|[^a-z_.-])rank[-_]?(\d+)(?!\d)", re.IGNORECASE)
_INTEGERS = re.compile(r"\d+")
MAX_DIGITS = 18
"""Longer numbers do not fit into int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedInfo:
    """`distributedInfo` of a trace; all None or empty where the trace has none (one process, old torch, a daemon)."""

    rank: int | None
    world_size: int | None
    backend: str | None
    groups: tuple[Group, ...]


def read_distributed_info(envelope: dict[str, Any]) -> DistributedInfo:
    """Tolerates what exists in the wild: the whole object or any list in it as a string, fields missing."""
    info = _unquoted(envelope.get("distributedInfo"))
    if not isinstance(info, dict):
        info = {}
    config = _unquoted(info.get("pg_config"))
    groups = [_group(entry) for entry in config if isinstance(entry, dict)] if isinstance(config, list) else []
    return DistributedInfo(
        rank=_rank(_integer(info.get("rank"))),
        world_size=_integer(info.get("world_size")),
        backend=info.get("backend") if isinstance(info.get("backend"), str) else None,
        groups=tuple(group for group in groups if group.ranks),
    )


def parse_ranks(value: object) -> tuple[int, ...] | None:
    """Ranks from a list or from its text; None when there are none, when one is beyond any job, or when the text was
    cut ("[0, 1, ..., 511]")."""
    ranks: tuple[int | None, ...] = ()
    if isinstance(value, (list, tuple)):
        ranks = tuple(_rank(rank) for rank in value if isinstance(rank, int))
    elif isinstance(value, str) and value.lstrip()[:1] in {"[", "("} and "..." not in value:
        ranks = tuple(_rank(_integer(digits)) for digits in _INTEGERS.findall(value))
    known = tuple(rank for rank in ranks if rank is not None)
    return known if known and len(known) == len(ranks) else None


def rank_in_name(path: Path) -> int | None:
    """rank_3.json, rank-3.x.json, host_rank3.json.gz; the parent folder's name counts too (rank0_ascend_pt)."""
    for name in (path.name, path.parent.name):
        if found := _RANK_IN_NAME.search(name):
            return _rank(_integer(found.group(1)))
    return None


def _group(entry: dict[str, Any]) -> Group:
    label = entry.get("pg_name", entry.get("uid", ""))
    return Group(name=str(label), ranks=tuple(sorted(parse_ranks(entry.get("ranks")) or ())))


def _unquoted(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except NOT_JSON:
        return None


def _rank(number: int | None) -> int | None:
    return number if number is not None and 0 <= number < MAX_RANKS else None


def _integer(value: object) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) <= MAX_DIGITS:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
