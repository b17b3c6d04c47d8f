"""A standing group of ranks for what ends well; tests that kill bring their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.feed.group import Group, Standing

pytest.register_assert_rewrite("tests.feed.contract", "tests.feed.party")


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
