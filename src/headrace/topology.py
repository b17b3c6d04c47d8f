"""Who shares a feed: which ranks, on which hosts, and which part of the data is theirs. Facts of a run, not choices."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The members of one feed as seen by one of them.

    `ranks` are the job-wide ranks of the members in group order (a set of ranks, never `rank // tp`: frameworks lay
    out groups as they like). `hosts` names each member's host; members of one host share one ring. `data_rank` and
    `data_size` say which shard of the samples the whole group consumes.
    """

    ranks: tuple[int, ...]
    index: int
    hosts: tuple[str, ...]
    data_rank: int = 0
    data_size: int = 1

    def __post_init__(self) -> None:
        if len(set(self.ranks)) != len(self.ranks) or not self.ranks:
            raise ConfigError(f"a group needs at least one rank, each once, got {self.ranks}")
        if not 0 <= self.index < len(self.ranks) or len(self.hosts) != len(self.ranks):
            raise ConfigError(f"index {self.index} and {len(self.hosts)} hosts do not fit {len(self.ranks)} ranks")
        if not 0 <= self.data_rank < self.data_size:
            raise ConfigError(f"data_rank must lie in [0, data_size), got {self.data_rank} of {self.data_size}")

    @property
    def rank(self) -> int:
        """The job-wide rank of this process."""
        return self.ranks[self.index]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The members on this process's host, in group order: the readers of its ring."""
        here = self.hosts[self.index]
        return tuple(rank for rank, host in zip(self.ranks, self.hosts, strict=True) if host == here)

    @property
    def reader_index(self) -> int:
        """This process's line in its host's ring."""
        return self.local_ranks.index(self.rank)

    @property
    def leads_host(self) -> bool:
        """The group's first rank on a host starts the feeder there."""
        return self.reader_index == 0
