"""What a checkpoint holds of a feed, what it fits, and the sentences with which another one is refused."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError, FeedClosed, FormatError
from headrace.feed import Feed, SourceContext
from headrace.feed.resume import check_fits, decode, encode
from headrace.position import Position, from_state_dict, to_state_dict
from tests.feed import sources

POSITIONS = st.builds(
    Position,
    consumed_samples=st.integers(0, 2**62),
    consumed_batches=st.integers(0, 2**62),
    data_size=st.integers(1, 10**6),
    source=st.text(min_size=1, max_size=30),
    source_state=st.none() | st.binary(max_size=100),
)
STATE: dict[str, Any] = to_state_dict(
    Position(consumed_samples=6, consumed_batches=3, source="tests.feed.sources.numbers")
)


@pytest.fixture(autouse=True)
def leaves_nothing(nothing_left: None) -> Iterator[None]:
    """See tests/conftest.py. A feeder ends soon after its last reader has left."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("reaper of headrace-feeder"):
            thread.join()


@given(POSITIONS)
def test_a_position_survives_a_checkpoint_and_the_way_to_the_feeder(position: Position) -> None:
    assert from_state_dict(pickle.loads(pickle.dumps(to_state_dict(position)))) == position
    assert decode(encode(position)) == position


def test_the_state_of_version_1_is_frozen() -> None:
    """If this changes, STATE_VERSION must too: checkpoints outlive the code that wrote them."""
    state = to_state_dict(
        Position(consumed_samples=12, consumed_batches=3, data_size=2, source="corpus", source_state=b"\x01")
    )
    assert state == {
        "version": 1,
        "consumed_samples": 12,
        "consumed_batches": 3,
        "data_size": 2,
        "source": "corpus",
        "source_state": b"\x01",
    }


@pytest.mark.parametrize("damaged", [
    {},
    [],
    None,
    "state",
    STATE | {"version": 2},
    STATE | {"version": "1"},
    STATE | {"consumed_samples": "6"},
    STATE | {"consumed_samples": 6.5},
    STATE | {"data_size": None},
    STATE | {"source_state": 5},
    STATE | {"source": b"bytes"},
    STATE | {"source": ""},
    STATE | {"data_size": 0},
    STATE | {"data_size": -2},
    STATE | {"consumed_samples": -1},
    STATE | {"consumed_samples": 2**63},
    STATE | {"consumed_batches": -1},
    STATE | {"consumed_batches": 2**80},
])  # fmt: skip
def test_what_is_no_state_is_refused(damaged: Any) -> None:
    with pytest.raises(FormatError, match="the feed's state"):
        from_state_dict(damaged)


def test_other_data_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="it says 'corpus', this feed reads 'another'"):
        check_fits(Position(source="corpus"), source="another", data_size=1, counts_samples=True)


def test_only_a_source_that_counts_samples_takes_another_data_size() -> None:
    position = Position(source="corpus", data_size=4)
    check_fits(position, source="corpus", data_size=8, counts_samples=True)
    with pytest.raises(ConfigError, match="taken with data_size 4, this job has 8"):
        check_fits(position, source="corpus", data_size=8, counts_samples=False)


def iterator_feed(iterator: Any, **how: Any) -> Feed[np.ndarray]:
    return Feed(iterator=iterator, writer_rank=0, **how)


def resumable() -> sources.Resumable:
    return sources.resumable(SourceContext(data_rank=0, data_size=1, seed=1))


def test_a_loaded_state_is_what_a_feed_says_until_its_first_batch() -> None:
    with iterator_feed(resumable()) as feed:
        next(feed)
        state = feed.state_dict()
    with iterator_feed(resumable()) as feed:
        feed.load_state_dict(state)
        assert feed.state_dict() == state
        assert next(feed)["numbers"].tolist() == [[0, 1, 1]]
        with pytest.raises(ConfigError, match="comes before the first batch"):
            feed.load_state_dict(state)
        assert feed.state_dict()["consumed_samples"] == 2
    assert feed.state_dict()["consumed_samples"] == 2, "also when it is closed"
    with pytest.raises(ConfigError, match="comes before the first batch"):
        feed.load_state_dict(state)


def test_the_data_size_of_a_new_state_is_that_of_the_job() -> None:
    state = to_state_dict(Position(consumed_samples=40, data_size=4, source="an iterator"))
    with iterator_feed(resumable(), data_size=2) as feed:
        feed.load_state_dict(state)
        next(feed)
        assert (feed.state_dict()["data_size"], feed.state_dict()["consumed_samples"]) == (2, 42)


def test_an_iterator_without_the_state_that_the_checkpoint_holds_is_refused() -> None:
    with iterator_feed(resumable()) as feed:
        next(feed)
        state = feed.state_dict()
    with iterator_feed(iter(())) as feed:
        feed.load_state_dict(state)
        with pytest.raises(
            ConfigError, match="holds the iterator's own state, but the one given now is a tuple_iterator"
        ):
            next(feed)


@pytest.mark.parametrize(("change", "text"), [
    ({"source": "tests.feed.sources.shapes"}, "taken with other data"),
    ({"data_size": 3}, "taken with data_size 3, this job has 1"),
])  # fmt: skip
def test_a_feeder_refuses_a_state_that_does_not_fit(change: dict[str, Any], text: str) -> None:
    with Feed(sources.numbers) as feed:
        feed.load_state_dict(STATE | change)
        for _ in range(2):
            with pytest.raises(ConfigError, match=text):
                next(feed)
    assert isinstance(feed._ended, ConfigError)


def test_a_damaged_state_of_the_source_is_refused() -> None:
    with Feed(sources.numbers) as feed:
        feed.load_state_dict(STATE | {"source": feed.state_dict()["source"], "source_state": b"x"})
        with pytest.raises(FormatError, match="the feed's state is damaged: source_state cannot be unpickled"):
            next(feed)
    with iterator_feed(resumable()) as feed:
        feed.load_state_dict(STATE | {"source": "an iterator", "source_state": b"x"})
        with pytest.raises(FormatError, match="source_state cannot be unpickled"):
            next(feed)


def test_a_feeder_draws_and_drops_what_was_consumed() -> None:
    with Feed(partial(sources.numbers, num_batches=5)) as feed:
        state = STATE | {"source": feed.state_dict()["source"]}
        feed.load_state_dict(state)
        assert [batch["numbers"][0, 1] for batch in feed] == [3, 4]
        assert (feed.state_dict()["consumed_samples"], feed.state_dict()["consumed_batches"]) == (10, 5)


def test_a_state_is_plain() -> None:
    with iterator_feed(resumable()) as feed:
        next(feed)
        assert {type(value) for value in feed.state_dict().values()} <= {int, str, bytes}
    with iterator_feed(sources.numbers(SourceContext(data_rank=0, data_size=1, seed=1))) as feed:
        next(feed)
        json.dumps(feed.state_dict())


def test_a_feed_that_is_dropped_without_closing_is_left() -> None:
    """No reference cycle holds it: descriptors and segments go with the last reference, see nothing_left."""
    import gc

    gc.disable()
    try:
        feed = Feed(sources.numbers)
        next(feed)
        finalizer = feed._finalizer
        del feed
        assert not finalizer.alive
    finally:
        gc.enable()


def test_a_batch_keeps_its_feed_open() -> None:
    feed = iterator_feed(resumable())
    batch = next(feed)
    del feed
    assert batch["numbers"].tolist() == [[0, 0, 1]]
    closed = iterator_feed(resumable())
    batch = next(closed)
    closed.close()
    with pytest.raises(FeedClosed):
        batch["numbers"]
