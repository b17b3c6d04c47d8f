"""The contract of tests/feed, with tensors, over a process group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.feed.contract import *  # noqa: F403
from tests.feed.group import Group
from tests.feed.party import Party


@pytest.fixture(params=["feeder", "iterator"])
def party(four: Group, request: pytest.FixtureRequest) -> Iterator[Party]:
    party = Party(four, shards=[(0, 1)] * 4, writer=request.param, kind="process_group")
    yield party
    party.clean_up()
