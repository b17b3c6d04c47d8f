"""What depends on how a group is named: the part of the contract that would notice, for each kind of group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.feed.contract import (  # noqa: F401
    test_a_batch_beyond_the_limit_is_refused_with_its_size_and_the_knob,
    test_a_rank_that_leaves_early_holds_nobody_up,
    test_a_state_is_the_same_on_every_rank_and_a_new_feed_goes_on_from_it,
    test_every_rank_gets_every_batch_in_order_and_the_same_end,
    test_ranks_that_want_different_feeds_are_all_refused,
    test_statistics_say_who_writes_and_how_many_came,
)
from tests.feed.group import Group
from tests.feed.party import Party
from tests.shm.company import Raised

PAIRS = [(0, 2), (0, 2), (1, 2), (1, 2)]
KINDS = {
    "mesh, feeder": ("feeder", PAIRS, 2),
    "mesh, iterator": ("iterator", PAIRS, 2),
    "ranks, iterator": ("iterator", PAIRS, 2),
    "single, iterator": ("iterator", [(rank, 4) for rank in range(4)], 1),
}


@pytest.fixture(params=KINDS)
def party(four: Group, request: pytest.FixtureRequest) -> Iterator[Party]:
    writer, shards, size = KINDS[request.param]
    kind = request.param.split(",")[0]
    party = Party(four, shards=shards, size_of_group=size, writer=writer, kind=kind)
    yield party
    party.clean_up()


@pytest.mark.parametrize(("names", "shape", "ranks", "shards"), [
    (["dp", "tp"], [2, 2], [(0, 1), (0, 1), (2, 3), (2, 3)], [(0, 2), (0, 2), (1, 2), (1, 2)]),
    (["tp", "dp"], [2, 2], [(0, 2), (1, 3), (0, 2), (1, 3)], [(0, 2), (1, 2), (0, 2), (1, 2)]),
    (["pp", "cp", "tp"], [2, 1, 2], [(0, 1, 2, 3)] * 4, [(None, None)] * 4),
    (["dp_replicate", "dp_shard", "cp"], [2, 2, 1], [(0,), (1,), (2,), (3,)], [(0, 4), (1, 4), (2, 4), (3, 4)]),
    (["pp", "batch", "tp"], [2, 2, 1], [(0, 2), (1, 3), (0, 2), (1, 3)], [(0, 2), (1, 2), (0, 2), (1, 2)]),
    (["whatever"], [4], [(0, 1, 2, 3)] * 4, [(None, None)] * 4),
])  # fmt: skip
def test_a_mesh_says_who_shares_data(
    four: Group, names: list[str], shape: list[int], ranks: list[tuple], shards: list[tuple]
) -> None:
    members = four.all("members", names, shape)
    assert [tuple(one["ranks"]) for one in members] == ranks
    assert [(one["data_rank"], one["data_size"]) for one in members] == shards


WRONG = {
    "an unknown setting": "a feed has no setting slots; it has num_slots, hold",
    "too few slots": "num_slots must be at least 2",
    "hold": "raise num_slots to at least 3",
    "hold as text": "hold must be a whole number, got '1' (str)",
    "no number": "timeout_s must be a positive number of seconds, got nan",
    "data_rank as text": "data_rank must be a whole number, got '0' (str)",
    "a view that is none": "view must be a View or None, got 3",
    "a config that is none": "config must be a FeedConfig or None, got 3",
    "no device": "'abacus' is no device",
    "another mesh": "contradicts the device mesh, which says",
    "data_rank beyond": "data_rank must lie in [0, data_size), got 5 of 2",
    "another data_rank": "disagree on data_rank: rank 0 says 0, rank 3 says 1",
    "another source": "disagree on the source: rank 0 says tests.feed.sources.numbers, rank 3 says",
    "another writer_rank": "disagree on writer_rank: rank 0 says 0, rank 3 says 1",
    "no source": "give either a source, or an iterator with the writer_rank that has it",
    "source and iterator": "give either a source, or an iterator with the writer_rank that has it",
    "no callable": "a source is PackedTokens or a callable, got a str",
    "a source that contradicts itself": "a blend by weight ends nowhere by itself: give num_samples",
    "unpicklable": "cannot be sent to the feeder process: not this one",
    "no iterator on the writer": "rank 1 is to write (writer_rank=1) but was given no iterator",
    "iterators on others": "only rank 1 writes, but ranks [0, 2, 3] were given an iterator too",
    "no iterable": "an iterator yields dicts of arrays, got a int",
    "writer_rank beyond": "writer_rank 4 is not in a group of 4 ranks (it counts within the group)",
    "ranks beyond": "a group has ranks of this job, 0 to 3, each once; got (0, 1, 2, 3, 4)",
    "a rank twice": "a group has ranks of this job, 0 to 3, each once; got (0, 1, 2, 3, 3)",
    "a name": "a group is a ProcessGroup, a DeviceMesh, ranks or None, got 'tp'",
    "other ranks": "is not a member of the group",
    "an unclear mesh": "does 'fsdp' select data or share it?",
}


@pytest.mark.parametrize("what", WRONG)
def test_a_feed_that_cannot_be_is_refused_on_every_rank_for_one_reason(four: Group, what: str) -> None:
    for error in four.try_all("make_with", what):
        assert isinstance(error, Raised), error
        assert error.kind == "ConfigError"
        assert WRONG[what] in error.text


def test_a_rank_that_does_not_come_is_named_and_may_come_later(four: Group) -> None:
    *waiting, absent = four.try_all("wait_for_missing")
    assert absent is None
    for error in waiting:
        assert error.kind == "FeedTimeout"
        assert "0.5 s for rank 3 to make its feed" in error.text
        assert "raise `start_timeout_s`" in error.text
        assert "alive" not in error.text, "nobody knows"
    party = Party(four, shards=[(0, 1)] * 4, writer="iterator", kind="process_group")
    party.make()
    assert party.take_all() == party.expected("numbers")
    party.clean_up()
