"""Continuing in the middle of an epoch: nothing comes twice, nothing is lost, with another number of data ranks too."""

from __future__ import annotations

import numpy as np
import pytest

from headrace import PackedTokens
from headrace.adapters.megatron import FeedIterator
from headrace.errors import ConfigError, FormatError
from headrace.feed import Feed
from tests.adapters.launching import make_corpus


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> PackedTokens:
    prefix = tmp_path_factory.mktemp("resume") / "corpus"
    make_corpus(prefix, num_documents=40)
    return PackedTokens(str(prefix), seq_length=16, num_epochs=3, eod=0)


def samples_of(source, *, data_rank=0, data_size=1, state=None, count=None):
    """Sample numbers of the next `count` micro batches, or all of them, and the state after them."""
    numbers, rows = [], []
    with Feed(source, data_rank=data_rank, data_size=data_size) as feed:
        if state is not None:
            feed.load_state_dict(state)
        for batch in feed:
            numbers += batch.samples
            rows.append(np.array(batch["tokens"]))
            if len(numbers) == count:
                break
        return numbers, rows, feed.state_dict()


def test_from_the_middle_of_an_epoch_through_two_more(source):
    whole = source.open_batches()
    total = len(whole)
    per_epoch = total // 3
    taken = int(per_epoch * 0.6) // 2
    shards = [samples_of(source, data_rank=rank, data_size=2, count=taken) for rank in (0, 1)]
    states = [state for _, _, state in shards]
    assert states[0] == states[1]
    assert states[0]["consumed_samples"] == 2 * taken
    rest, rows, _ = samples_of(source, state=states[0])
    assert sorted(shards[0][0] + shards[1][0] + rest) == list(range(total))
    for number, row in zip(rest, rows, strict=True):
        assert np.array_equal(row, whole[number]["tokens"])


def test_megatrons_count_is_the_state(source):
    """consumed_train_samples alone says where a FeedIterator begins."""
    whole = source.open_batches()
    iterator = FeedIterator(source, ranks=[0], data_rank=0, data_size=1, consumed_samples=7)
    first = next(iterator)
    iterator.close()
    assert np.array_equal(first["tokens"], whole[7]["tokens"])
    assert first["actual_seq_len"][-1] == 16
    assert first["max_document"] == whole[7]["max_seqlen"]


def test_the_state_of_something_else_is_refused_by_name(source, tmp_path):
    _, _, state = samples_of(source, count=1)
    with Feed(source) as feed, pytest.raises(FormatError, match="version 99, this headrace reads version 1"):
        feed.load_state_dict(state | {"version": 99})
    make_corpus(tmp_path / "other", num_documents=41)
    other = PackedTokens(str(tmp_path / "other"), seq_length=16, num_epochs=3, eod=0)
    with Feed(other) as feed:
        feed.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"taken with other data: it says .*corpus.*, this feed reads"):
            next(feed)
