"""Four standing ranks with torch and gloo: to import torch four times costs more than all that they do."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.feed.group import Group, Standing

pytest.register_assert_rewrite("tests.feed.contract", "tests.feed.party")


@pytest.fixture(autouse=True)
def guarded(watchdog: None) -> None:
    """See tests/conftest.py."""


def torch_group(num_ranks: int, **environment: str) -> Group:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks), **environment}
    return Group(num_ranks, role="torch", environments=[shared | {"RANK": str(rank)} for rank in range(num_ranks)])


@pytest.fixture(scope="session")
def standing_four() -> Iterator[Standing]:
    standing = Standing(lambda: torch_group(4))
    yield standing
    standing.disband()


@pytest.fixture
def four(standing_four: Standing) -> Group:
    return standing_four.group()
