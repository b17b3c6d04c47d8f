"""A batch that is ready comes without a line of Python: its feed's and its keys' work is native/batch.c's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from headrace import _native
from headrace.errors import FeedClosed
from headrace.feed import Feed, FeedConfig
from headrace.feed.batch import Batch

from .sources import numbers, resumable

NUM_SLOTS = 4


@pytest.fixture
def feed() -> Iterator[Feed]:
    with Feed(partial(numbers, num_batches=50), config=FeedConfig(num_slots=NUM_SLOTS, hold=2)) as feed:
        yield feed


def until_ready(feed: Feed) -> None:
    while feed.stats().ahead == 0:
        os.sched_yield()  # another process writes: there is no event to wait for


def python_calls(work: Callable[[], Any]) -> list[str]:
    """Names of the Python functions that `work` calls."""
    names: list[str] = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    return names[1:]  # without `work` itself


def test_a_ready_batch_and_its_keys_cost_no_python_call(feed: Feed) -> None:
    first = next(feed)
    until_ready(feed)
    assert "_next_slowly" in python_calls(lambda: next(feed)), "a slot's first batch is Python's, with its arrays"
    for _ in range(NUM_SLOTS):
        next(feed)
    until_ready(feed)
    taken: list[Batch] = []
    assert python_calls(lambda: taken.append(next(feed))) == []
    (batch,) = taken
    assert python_calls(lambda: (batch["numbers"], batch.max_seqlen, batch.index, batch.consumed_samples)) == []
    assert batch["numbers"].tolist() == [[0, 6, 1234]] * 2
    assert (batch.index, batch.extra, batch.consumed_samples) == (6, {"name": "batch 6"}, 14)
    assert isinstance(batch, Batch)
    assert first.index == 0


def test_the_last_hold_batches_are_valid_and_older_ones_are_not(feed: Feed) -> None:
    batches = [next(feed) for _ in range(3 * NUM_SLOTS)]
    for batch in batches[:-2]:
        with pytest.raises(FeedClosed, match=f"batch {batch.index} is no longer valid"):
            batch["numbers"]
        with pytest.raises(FeedClosed):
            _ = batch.extra
    assert [batch["numbers"][0, 1] for batch in batches[-2:]] == [10, 11]
    feed.close()
    with pytest.raises(FeedClosed, match="batch 11 is no longer valid"):
        batches[-1]["numbers"]
    with pytest.raises(FeedClosed, match="this feed is closed"):
        next(feed)


def test_a_state_counts_batches_that_came_without_python(feed: Feed) -> None:
    for _ in range(3 * NUM_SLOTS):
        next(feed)
    state = feed.state_dict()
    with Feed(partial(numbers, num_batches=50), config=FeedConfig(num_slots=NUM_SLOTS)) as resumed:
        resumed.load_state_dict(state)
        assert next(resumed)["numbers"][0, 1] == 12
    assert feed.stats().delivered == 12


def test_a_source_with_a_state_of_its_own_is_asked_for_it_with_each_batch() -> None:
    with Feed(partial(resumable, num_batches=40)) as feed:
        states = {bytes(str(feed.state_dict()), "utf-8") for _ in feed}
    assert len(states) == 40


def test_what_is_lent_must_come_from_a_ring() -> None:
    lender = _native.Lender()
    with pytest.raises(TypeError, match="a RingReader, a dict, a type of Batch"):
        lender._lend_from(lender, {}, Batch, 0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lender must be a Lender or None"):
        Batch({}, 0, (), object(), None)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="tokens"):
        Batch({}, 0, (), None, None)["tokens"]


class OwnFeed(Feed):
    def __new__(cls, *_: Any, **__: Any) -> OwnFeed:
        return super().__new__(cls)


def test_a_subclass_may_make_its_feeds_itself() -> None:
    with OwnFeed(partial(numbers, num_batches=3 * NUM_SLOTS), config=FeedConfig(num_slots=NUM_SLOTS)) as feed:
        assert [batch["numbers"][0, 1] for batch in feed] == list(range(3 * NUM_SLOTS))
