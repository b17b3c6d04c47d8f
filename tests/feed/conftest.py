"""A standing group of ranks for what ends well; tests that kill bring their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.feed.group import Group

pytest.register_assert_rewrite("tests.feed.contract", "tests.feed.party")


@pytest.fixture(autouse=True)
def guarded(watchdog: None) -> None:
    """See tests/conftest.py."""


@pytest.fixture(scope="session")
def three() -> Iterator[Group]:
    group = Group(3)
    yield group
    assert group.disband() == ""
