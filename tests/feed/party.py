"""A group of ranks with one way of making feeds: who writes, and how the group is named. The contract runs on each."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np

from headrace.feed import SourceContext
from tests.feed import sources
from tests.feed.group import Group, await_end, feeders_of
from tests.feed.rank import plain, values
from tests.shm.company import Raised


class Party:
    """`shards`: data_rank and data_size of each rank."""

    def __init__(self, group: Group, *, shards: list[tuple[int, int]], **how: Any) -> None:
        self.group, self.shards, self.how = group, shards, how
        self.names: set[str] = set()
        self.is_debugging = False
        self.size_of_group = how.pop("size_of_group", group.num_ranks)

    def make(self, name: str = "feed", **how: Any) -> None:
        self.names.add(name)
        self.group.make(name, **(self.how | how))

    def take(self, count: int = 1, name: str = "feed", **how: Any) -> list[list[Any]]:
        """What each rank gets."""
        return self.group.all("take", count, name, **how)

    def take_all(self, name: str = "feed") -> list[list[Any]]:
        return self.group.all("take_all", name)

    def errors(self, call: str, *args: Any, **kwargs: Any) -> list[Raised]:
        """The error that the call raises on every rank: of one class everywhere."""
        outcomes = self.group.try_all(call, *args, **kwargs)
        assert all(isinstance(one, Raised) for one in outcomes), outcomes
        assert len({one.kind for one in outcomes}) == 1, outcomes
        return outcomes

    def error(self, call: str, *args: Any, **kwargs: Any) -> Raised:
        """The same, where the text is one as well."""
        errors = self.errors(call, *args, **kwargs)
        assert len({str(error) for error in errors}) == 1, errors
        return errors[0]

    def close(self, name: str = "feed") -> None:
        self.names.discard(name)
        self.group.all("close", name)

    def expected(self, source: str, **params: Any) -> list[list[dict[str, Any]]]:
        """What each rank should get of the source, read here."""
        return [self._read(source, params, shard) for shard in self.shards]

    def _read(self, source: str, params: dict[str, Any], shard: tuple[int, int]) -> list[dict[str, Any]]:
        context = SourceContext(data_rank=shard[0], data_size=shard[1], seed=1234)
        chosen = partial(getattr(sources, source), **params)
        return [as_described(index, item) for index, item in enumerate(chosen(context))]

    def debug(self) -> None:
        """For what is made until the end of the test."""
        self.is_debugging = True
        self.group.all("debug", True)

    def clean_up(self) -> dict[str, int]:
        """Close what is open, see the feeders end; what is left in each rank, which is the same for all."""
        self.group.all("drop_held")
        if self.is_debugging:
            self.group.all("debug", False)
        for name in list(self.names):
            self.group.try_all("close", name)
        self.names.clear()
        for feeder in feeders_of(self.group):
            await_end(feeder)
        left = self.group.all("census")
        assert [one["segments"] for one in left] == [0] * self.group.num_ranks, "a closed feed leaves no segment mapped"
        return {str(rank): one["descriptors"] for rank, one in enumerate(left)}


def as_described(index: int, item: dict[str, Any]) -> dict[str, Any]:
    """A source's dict as rank.py describes the batch that it becomes."""
    fields, extra = {}, {}
    for key, value in item.items():
        if isinstance(value, np.ndarray | np.number):
            array = np.asarray(value)
            fields[key] = [array.dtype.newbyteorder("<").str, list(array.shape), values(array)]
        else:
            extra[key] = value
    return json.loads(json.dumps({"index": index, "fields": fields, "extra": plain(extra), "samples": []}))
