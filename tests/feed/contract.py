"""What every feed promises, whoever writes it and however its group is named. Imported by the modules that run it.

The fixture `party` is the group of ranks; see party.py.
"""

from __future__ import annotations

import pytest

from tests.feed import sources
from tests.feed.group import PerRank
from tests.feed.party import Party

MIB = 1 << 20


def test_every_rank_gets_every_batch_in_order_and_the_same_end(party: Party) -> None:
    party.make()
    taken = party.take(7)
    expected = party.expected("numbers")
    assert [batches[:5] for batches in taken] == expected
    assert all(batches[5:] == ["END", "END"] for batches in taken), "the end stays"


@pytest.mark.parametrize("source", ["every_dtype", "shapes", "with_extra"])
def test_a_batch_arrives_as_it_was(party: Party, source: str) -> None:
    party.make(source=source)
    assert party.take_all() == party.expected(source)


def test_a_source_without_batches_ends_at_once(party: Party) -> None:
    party.make(source="nothing")
    assert all(batches == ["END"] for batches in party.take(1))


@pytest.mark.parametrize(("num_slots", "hold"), [(2, 1), (3, 2), (4, 3)])
def test_slots_grow_with_the_batches_and_with_the_metadata(party: Party, num_slots: int, hold: int) -> None:
    party.make(source="growing", num_slots=num_slots, hold=hold)
    expected = party.expected("growing")
    for step in range(5):
        assert party.take(1, hold=True) == [batches[step : step + 1] for batches in expected]
        held = party.group.all("take_held")
        stale = max(0, step + 1 - hold)
        assert held == [["FeedClosed"] * stale + batches[stale : step + 1] for batches in expected]
    assert party.group.all("stats")[0]["slot_bytes"] > 900_001 * 4


def test_the_last_batches_stay_valid_and_older_ones_say_that_they_are_not(party: Party) -> None:
    party.make(num_slots=5, hold=3)
    party.take(4, hold=True)
    assert party.group.all("take_held") == [["FeedClosed", *batches[1:4]] for batches in party.expected("numbers")]
    party.close()


def test_owned_batches_stay_valid_for_ever(party: Party) -> None:
    party.make(owned=True, num_slots=2)
    party.take(5, hold=True)
    assert party.group.all("take_held") == party.expected("numbers")
    party.group.all("close", "feed")
    party.names.clear()


def test_several_feeds_live_in_one_group_side_by_side(party: Party) -> None:
    party.make("training", params={"num_batches": 6})
    party.make("validation", params={"num_batches": 2, "rows": 3})
    training, validation = party.expected("numbers", num_batches=6), party.expected("numbers", num_batches=2, rows=3)
    assert party.take(2, "training") == [batches[:2] for batches in training]
    assert party.take(3, "validation") == [[*batches, "END"] for batches in validation]
    party.close("validation")
    assert party.take(5, "training") == [[*batches[2:], "END"] for batches in training]


@pytest.mark.parametrize("source", ["numbers", "resumable"])
def test_a_state_is_the_same_on_every_rank_and_a_new_feed_goes_on_from_it(party: Party, source: str) -> None:
    params = {"num_batches": 6}
    party.make(source=source, params=params)
    fresh = party.group.all("state")
    party.take(2)
    states = party.group.all("state")
    groups = [states[i : i + party.size_of_group] for i in range(0, len(states), party.size_of_group)]
    assert all(len(set(group)) == 1 for group in groups), "the ranks of a group agree"
    party.close()

    for state, num_taken in ((states, 2), (fresh, 0)):
        is_numbers_by_iterator = source == "numbers" and party.how["writer"] == "iterator"
        party.make(source=source, params=params)
        for rank, own in zip(party.group.ranks, state, strict=True):
            rank.load(own)
        # An iterator without a state of its own is where whoever passes it has put it.
        skipped = 0 if is_numbers_by_iterator else num_taken
        rests = party.take(6 - skipped)
        expected = party.expected(source, **params)
        assert [numbers_in(rest) for rest in rests] == [numbers_in(batches)[skipped:] for batches in expected]
        if source == "resumable":
            assert rests[0][0]["fields"]["numbers"][2][2] == "1", "nothing was drawn and dropped"
        party.close()


def numbers_in(batches: list[dict]) -> list[str]:
    """Shard and number of each batch."""
    return [batch["fields"]["numbers"][2][:2] for batch in batches]


def test_the_state_after_the_last_batch_is_that_of_the_end(party: Party) -> None:
    party.make(source="resumable", params={"num_batches": 2})
    party.take(2)
    last = party.group.all("state")
    assert party.take(1) == [["END"]] * party.group.num_ranks
    assert party.group.all("state") == last
    party.close()
    party.make(source="resumable", params={"num_batches": 2})
    for rank, own in zip(party.group.ranks, last, strict=True):
        rank.load(own)
    assert party.take(1) == [["END"]] * party.group.num_ranks


def test_a_state_comes_before_the_first_batch(party: Party) -> None:
    party.make()
    state = party.group.all("state")[0]
    party.take(1)
    assert "comes before the first batch" in party.error("load", state).text


@pytest.mark.parametrize("after", [0, 3])
def test_the_sources_exception_is_raised_on_every_rank_at_the_same_batch(party: Party, after: int) -> None:
    party.make(source="raising", params={"after": after})
    assert [len(batches) for batches in party.take(after)] == [after] * party.group.num_ranks
    for _ in range(2):  # and again, whoever asks again
        error = party.error("take", 1)
        assert error.kind == "SourceError"
        assert "the data source raised ValueError: the disk is on fire" in error.text
        assert "in raising" in error.numbers["source_traceback"], "the traceback shows the user's line"


def test_no_exception_is_too_odd_to_travel(party: Party) -> None:
    party.make(source="raising_oddly")
    party.take(1)
    assert {one.kind for one in party.errors("take", 1)} == {"SourceError"}


@pytest.mark.parametrize("name", ["a list", "another dtype"])  # all of them: test_items.py
def test_what_cannot_be_shared_is_refused_by_name_on_every_rank(party: Party, name: str) -> None:
    party.make(source="bad_batch", params={"name": name})
    party.take(1)
    error = party.error("take", 1)
    assert error.kind == "ConfigError"
    assert sources.BAD_BATCHES[name][1] in error.text


def test_a_first_batch_that_cannot_be_shared_is_refused_on_every_rank(party: Party) -> None:
    party.make(source="many_fields")
    error = party.error("take", 1)
    assert (error.kind, error.text) == ("ConfigError", "a batch has 1 to 32 fields, got 33")


@pytest.mark.parametrize("after", [0, 1])
def test_a_batch_beyond_the_limit_is_refused_with_its_size_and_the_knob(party: Party, after: int) -> None:
    party.make(source="large", params={"num_bytes": 2 * MIB, "after": after}, max_slot_bytes=MIB)
    party.take(after)
    error = party.error("take", 1)
    assert error.kind == "BatchTooLarge"
    assert error.numbers["need"] > 2 * MIB
    assert (error.numbers["have"], error.numbers["knob"]) == (MIB, "max_slot_bytes")


def test_ranks_that_begin_with_different_states_are_all_refused(party: Party) -> None:
    if party.size_of_group == 1:
        pytest.skip("one rank agrees with itself")
    party.make(source="resumable")
    party.take(1)
    [state, *_] = party.group.all("state")
    party.close()
    party.make(source="resumable")
    for group in range(0, party.group.num_ranks, party.size_of_group):
        party.group.ranks[group].load(state)
    assert {error.kind for error in party.errors("take", 1)} == {"ConfigError"}
    assert "must begin with one state, but those of" in party.errors("take", 1)[0].text


def test_ranks_that_want_different_feeds_are_all_refused(party: Party) -> None:
    if party.size_of_group == 1:
        pytest.skip("one rank agrees with itself")
    odd = PerRank([4] * party.group.num_ranks)
    for group in range(0, party.group.num_ranks, party.size_of_group):
        odd[group + party.size_of_group - 1] = 6
    errors = party.group.try_make("feed", **(party.how | {"num_slots": odd}))
    assert {error.kind for error in errors} == {"ConfigError"}
    assert all("disagree on num_slots" in error.text and "says 4" in error.text for error in errors)


def test_a_users_exception_stays_the_users(party: Party) -> None:
    party.make()
    party.names.clear()
    outcomes = party.group.try_all("fail_inside")
    assert {(one.kind, one.text) for one in outcomes} == {("ZeroDivisionError", "the user's own, in batch 0")}


def test_a_closed_feed_says_so_and_the_batches_it_lent_too(party: Party) -> None:
    party.make()
    party.take(1, hold=True)
    for rank in party.group.ranks:
        rank.close_but_keep("feed")
    assert party.error("take", 1).kind == "FeedClosed"
    assert party.error("stats").kind == "FeedClosed"
    assert party.group.all("take_held") == [["FeedClosed"]] * party.group.num_ranks


def test_statistics_say_who_writes_and_how_many_came(party: Party) -> None:
    party.make(num_slots=3)
    assert party.errors("stats")[0].kind == "FeedClosed", "not before the first batch"
    party.take(2)
    for rank, stats in enumerate(party.group.all("stats")):
        assert (stats["rank"], stats["delivered"], stats["num_slots"]) == (rank, 2, 3)
        assert stats["ring_bytes"] == 3 * stats["slot_bytes"]
        assert 0 <= stats["ahead"] <= 4
        assert stats["wait_s"] >= 0
        writes_itself = party.how["writer"] == "iterator" and stats["writer_wait_s"] is not None
        assert (stats["writer"] == f"rank {rank}") == writes_itself
        if party.how["writer"] == "feeder":
            assert stats["writer"] == "the feeder"
    party.take(4)
    assert {stats["ahead"] for stats in party.group.all("stats")} == {0}, "nothing comes after the end"


def test_a_debugging_run_gets_the_same_batches(party: Party) -> None:
    party.debug()
    party.make(source="growing")
    expected = party.expected("growing")
    assert party.take_all() == expected


def test_boundaries_come_with_their_longest_segment_as_a_python_int(party: Party) -> None:
    party.make(source="boundaries")
    assert party.group.all("names") == [
        {"ints": {"max_seqlen": 5}, "max_seqlen": 5, "num_documents": 2, "consumed_samples": 8 * size, "len": 3}
        for _, size in party.shards
    ]
    assert {one["max_seqlen"] for one in party.group.all("names")} == {8}
    party.close()
    party.make(source="boundaries_of_transformers")
    assert {tuple(one["ints"].items()) for one in party.group.all("names")} == {
        (("max_length_q", 5), ("max_length_k", 5))
    }
    party.close()
    party.make(source="boundaries_of_rows")
    assert [one["ints"] for one in party.group.all("names")] == [{}] * party.group.num_ranks, "nothing made up"


def test_a_feed_that_nobody_reads_leaves_no_process(party: Party) -> None:
    party.make()
    party.close()


def test_a_rank_that_leaves_early_holds_nobody_up(party: Party) -> None:
    """Before its first batch, too: the others go on, and the writer waits for those only."""
    if party.size_of_group == 1:
        pytest.skip("there are no others")
    for num_taken in (0, 2):
        party.make(params={"num_batches": 20}, num_slots=2)
        leavers = party.group.ranks[1 :: party.size_of_group]
        others = [rank for rank in party.group.ranks if rank not in leavers]
        if num_taken:
            party.take(num_taken)
        for rank in leavers:
            rank.close()
        for rank in others:
            rank.begin_call("take_all")
        for rank in others:
            assert len(rank.answer()) == 20 - num_taken
        for rank in others:
            rank.close()
        party.names.clear()
