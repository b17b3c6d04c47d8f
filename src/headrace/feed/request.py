"""What one rank asks for when it makes its feed, and what of it the other ranks must ask for as well."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.arguments import whole_number
from headrace.errors import ConfigError
from headrace.feed import shard
from headrace.feed.config import FeedConfig
from headrace.feed.source import Source
from headrace.shm.placement import chosen, read_cores
from headrace.topology import Topology

ITERATOR_IDENTITY = "an iterator"
"""What a checkpoint remembers of data that came from a rank's own iterator: nothing that could be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedRequest:
    """The arguments of a feed. Only `iterator`, `rank` and `device_node` may differ from rank to rank."""

    source: Source | None
    iterator: Iterable[Mapping[str, Any]] | None
    writer_rank: int | None
    ranks: tuple[int, ...]
    rank: int
    data_rank: int
    data_size: int
    seed: int
    config: FeedConfig
    parts: str
    """What the views of all ranks must have in common."""
    device_node: int | None = None
    """The NUMA node of this rank's device, if it has one and it is known."""

    def check(self) -> None:
        """ConfigError for what contradicts itself, whatever the other ranks say."""
        source, iterator, writer_rank, ranks = self.source, self.iterator, self.writer_rank, self.ranks
        if (source is None) == (writer_rank is None) or (source is not None and iterator is not None):
            raise ConfigError(
                "give either a source, or an iterator with the writer_rank that has it (and None on the other ranks)"
            )
        if source is not None and not callable(source):
            raise ConfigError(f"a source is PackedTokens or a callable, got a {type(source).__name__}")
        shard.check(source)
        if iterator is not None and not hasattr(iterator, "__iter__"):
            raise ConfigError(f"an iterator yields dicts of arrays, got a {type(iterator).__name__}")
        if writer_rank is not None and not 0 <= whole_number("writer_rank", writer_rank) < len(ranks):
            raise ConfigError(
                f"writer_rank {writer_rank} is not in a group of {len(ranks)} ranks (it counts within the group)"
            )
        if len(set(ranks)) != len(ranks):
            raise ConfigError(f"a group has each rank once, got {ranks}")
        if self.rank not in ranks:
            raise ConfigError(f"rank {self.rank} is not a member of the group {ranks}")
        whole_number("seed", self.seed)
        if self.config.feeder_cpus is not None:
            chosen(self.config.feeder_cpus, read_cores())
        if not 0 <= self.data_rank < self.data_size:
            raise ConfigError(f"data_rank must lie in [0, data_size), got {self.data_rank} of {self.data_size}")

    def terms(self) -> dict[str, str]:
        """By name: what all ranks must agree on, as text that can be compared and shown."""
        terms = {
            "the source": ITERATOR_IDENTITY if self.source is None else shard.description(self.source),
            "writer_rank": str(self.writer_rank),
            "data_rank": str(self.data_rank),
            "data_size": str(self.data_size),
            "seed": str(self.seed),
            "the views": self.parts,
        }
        return terms | {field.name: repr(getattr(self.config, field.name)) for field in dataclasses.fields(self.config)}

    def topology(self, hosts: tuple[str, ...]) -> Topology:
        """Who shares the feed, once it is known which rank is on which host."""
        return Topology(
            ranks=self.ranks,
            index=self.ranks.index(self.rank),
            hosts=hosts,
            data_rank=self.data_rank,
            data_size=self.data_size,
        )
