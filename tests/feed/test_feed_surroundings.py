"""A feed and what is around it: hosts, logs, debugging, random state, limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.feed.group import Group, feeders_of
from tests.feed.party import Party
from tests.shm.company import Raised


def test_a_group_over_two_hosts_has_a_feeder_on_each_and_the_same_batches(assembled: Callable[..., Group]) -> None:
    group = assembled(4, environments=[{"HEADRACE_HOST": host} for host in "abab"])
    group.make(params={"num_batches": 4})
    assert len(feeders_of(group)) == 2
    taken = group.all("take", 5)
    assert all(batches == taken[0] for batches in taken)
    assert taken[0][-1] == "END"
    writers = [stats["writer_pid"] for stats in group.all("stats")]
    assert writers[0] == writers[2] != writers[1] == writers[3]
    group.all("close")
    refused = group.try_make("other", writer="iterator")
    assert {error.kind for error in refused} == {"ConfigError"}
    assert "rank 0 cannot share memory with ranks [1, 3] on other hosts; give the feed a source" in refused[0].text


def test_hosts_that_read_different_data_are_told_so_on_every_rank(assembled: Callable[..., Group]) -> None:
    group = assembled(2, environments=[{"HEADRACE_HOST": "a"}, {"HEADRACE_HOST": "b"}])
    group.make(source="number_of_host", params={"num_batches": 100})
    group.all("take", 1)
    for rank in group.ranks:
        with pytest.raises(Raised) as caught:
            rank.take(1)  # both have had their say by now
        assert caught.value.kind == "ConfigError"
        assert "do not read the same data: batch 0 has digest" in caught.value.text
        assert "give every host the same files" in caught.value.text


def test_the_group_says_at_its_start_what_memory_it_takes(standing: Party) -> None:
    standing.make(num_slots=3)
    standing.take(1)
    stats = standing.group.all("stats")[0]
    lines = [[line for line in log if line.startswith("feed up")][-1:] for log in standing.group.all("messages")]
    assert lines[1:] == [[], []], "said once"
    assert f"3 slots of {stats['slot_bytes']} bytes" in lines[0][0]
    assert f"for 3 ranks, written by the feeder (pid {stats['writer_pid']})" in lines[0][0]


def test_a_write_into_a_lent_batch_shows_in_a_debugging_run(standing: Party) -> None:
    standing.debug()
    standing.make()
    standing.take(1)
    assert {(error.kind, error.text) for error in standing.errors("write_into_batch")} == {
        ("ValueError", "assignment destination is read-only")
    }


def test_the_random_state_of_the_ranks_is_their_own(standing: Party) -> None:
    """And a source that draws without a seed gives all of them one batch: it is read once."""
    before = standing.group.all("random_state")
    standing.make(source="drawing")
    taken = standing.take_all()
    assert taken[0] == taken[1] == taken[2]
    assert standing.group.all("random_state") == before


def test_too_few_descriptors_are_a_named_error(assembled: Callable[..., Group]) -> None:
    group = assembled(1)
    group.make()
    group.ranks[0].limit_descriptors(1)
    [error] = group.try_make("another")
    assert error.kind == "ConfigError"
    assert "oo many open files" in error.text
