"""Balanced steps through a token store and a feed: every row once, costs as the batches say, continued anywhere."""

from __future__ import annotations

import numpy as np
import pytest

from headrace import PackedTokens
from headrace.errors import ConfigError
from headrace.feed import Feed
from headrace.order import cost_of
from headrace.store import StoreWriter

STEP = {"balance": "dp", "micro_batches_per_step": 2, "seq_length": 32, "attention_cost": 0.1}


@pytest.fixture
def corpus(tmp_path):
    random = np.random.default_rng(8)
    with StoreWriter(tmp_path / "corpus", np.uint16) as writer:
        while writer.num_tokens < 1500:
            length = min(100, max(1, int(random.lognormal(1.5, 1.5))))
            writer.add_document(np.arange(length) + writer.num_tokens + 1)
    return str(tmp_path / "corpus")


def turns(source, data_size, **where):
    """Per turn, what each rank gets: sample numbers, tokens, and the row costs that its boundaries tell."""
    ranks = [source.open_batches(data_rank=rank, data_size=data_size, **where) for rank in range(data_size)]
    return [[(batches.samples(turn), batches[turn]) for batches in ranks] for turn in range(len(ranks[0]))]


@pytest.mark.parametrize("order", ["megatron", "elastic"])
@pytest.mark.parametrize("rows", [1, 2])
def test_ranks_share_each_step_by_cost(corpus, order, rows):
    plain = PackedTokens(corpus, seq_length=32, order=order)
    stored = {number: plain.open_batches()[number]["tokens"].ravel().tolist() for number in range(12 * rows)}
    source = PackedTokens(corpus, order=order, micro_batch_size=rows, **STEP)
    found = turns(source, 3)[:4]
    assert sorted(number for turn in found for samples, _ in turn for number in samples) == list(range(12 * rows))
    for turn in found:
        for samples, batch in turn:
            assert batch["tokens"].tolist() == [stored[number] for number in samples]
    for step in (found[:2], found[2:]):
        sums = [sum(cost_of(np.diff(turn[rank][1]["cu_seqlens"]).tolist(), 0.1) for turn in step) for rank in range(3)]
        sampled = [source.open_batches()._cost(number) for turn in step for some, _ in turn for number in some]
        assert sum(sums) == sum(sampled), "the cost of a row is what its boundaries say"
        # Three ranks, one after the other, as stored.
        assert max(sums) <= max(
            sum(sampled_at(source, step, turn, rank, rows) for turn in range(2)) for rank in range(3)
        )


def sampled_at(source, step, turn, rank, rows):
    """What the stored order would have given this rank in this turn."""
    first = min(number for one in step for samples, _ in one for number in samples)
    batches = source.open_batches()
    start = first + (turn * 3 + rank) * rows
    return sum(batches._cost(number) for number in range(start, start + rows))


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("multiple", [1, 4])
def test_the_cost_of_whole_documents_is_what_their_boundaries_say(corpus, extra, multiple):
    whole = {"documents": "whole", "pad": 0, "pad_documents_to": multiple, "add_extra_token": extra}
    batches = PackedTokens(corpus, **STEP, **whole).open_batches()
    for turn in range(len(batches)):
        (sample,) = batches.samples(turn)
        assert batches._cost(sample) == cost_of(np.diff(batches[turn]["cu_seqlens"]).tolist(), 0.1)
    assert len(batches) > 20


def test_a_feed_continues_inside_a_step_with_the_same_dealing_only(corpus):
    source = PackedTokens(corpus, **STEP)
    with Feed(source, data_rank=1, data_size=2) as feed:
        samples, states = [], []
        for batch in feed:
            samples.append(batch.samples)
            states.append(feed.state_dict())
    assert [state["source_state"] is None for state in states[:4]] == [False, True, False, True]
    inside, between = states[2], states[3]
    with Feed(source, data_rank=1, data_size=2) as feed:
        feed.load_state_dict(inside)
        assert [batch.samples for batch in feed] == samples[3:]
    with Feed(source, data_rank=0, data_size=1) as feed:
        feed.load_state_dict(between)
        rest = [number for batch in feed for number in batch.samples]
    assert sorted(rest) == list(range(8, 8 + len(rest)))
    with Feed(source, data_rank=0, data_size=1) as feed:
        feed.load_state_dict(inside)
        with pytest.raises(ConfigError, match="after 1 of 2 micro batches of a balanced step"):
            next(iter(feed))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"balance": "pp"}, "balance must be one of none, dp, got 'pp'"),
        ({"balance": "none"}, "micro_batches_per_step=2 is dealt out together, which needs balance='dp'"),
        ({"boundaries": "eod", "eod": 3}, "goes by the lengths of documents and needs boundaries='documents'"),
        ({"micro_batches_per_step": 0}, "micro_batches_per_step must be at least 1, got 0"),
    ],
)
def test_balance_without_a_meaning(corpus, wrong, message):
    with pytest.raises(ConfigError, match=message):
        PackedTokens(corpus, **STEP | wrong).open_batches()
