"""The contract, for ranks that know NumPy only: a feeder process writes, or one of them from its iterator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.feed.contract import *  # noqa: F403
from tests.feed.group import Group
from tests.feed.party import Party

_baseline: dict[str, dict[str, int]] = {}


@pytest.fixture(params=["feeder", "iterator of rank 0", "iterator of rank 2"])
def party(three: Group, request: pytest.FixtureRequest) -> Iterator[Party]:
    writer, _, rank = request.param.partition(" of rank ")
    party = Party(three, shards=[(1, 3)] * 3, data_rank=1, data_size=3, writer=writer)
    if rank:
        party.how["writer_rank"] = int(rank)
    yield party
    left = party.clean_up()
    assert left == _baseline.setdefault("three", left), "descriptors are left open"
