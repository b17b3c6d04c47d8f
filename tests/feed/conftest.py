"""A standing group of ranks for what ends well; tests that kill bring their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.register_assert_rewrite("tests.feed.contract", "tests.feed.party")  # before anything imports them

from tests.feed.group import Group, Standing, await_end, feeders_of  # noqa: E402
from tests.feed.party import Party  # noqa: E402


@pytest.fixture(autouse=True)
def guarded(watchdog: None) -> None:
    """See tests/conftest.py."""


@pytest.fixture(scope="session")
def standing_three() -> Iterator[Standing]:
    standing = Standing(lambda: Group(3))
    yield standing
    assert standing.disband() == ""


@pytest.fixture
def three(standing_three: Standing) -> Group:
    return standing_three.group()


@pytest.fixture
def assembled() -> Iterator[Callable[..., Group]]:
    """Groups to kill. Their feeders must end with them, and none may write a word to stderr."""
    groups: list[Group] = []

    def assemble(num_ranks: int = 2, **how: list[dict[str, str]]) -> Group:
        groups.append(Group(num_ranks, **how))
        return groups[-1]

    yield assemble
    for group in groups:
        left = feeders_of(group)
        assert group.disband() == ""
        for feeder in left:
            await_end(feeder)


@pytest.fixture
def standing(three: Group) -> Iterator[Party]:
    party = Party(three, shards=[(0, 1)] * 3)
    yield party
    party.clean_up()
