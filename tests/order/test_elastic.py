"""The elastic order: a bijection, samples that tile the stream, and nothing of the corpus's size anywhere."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import PackedTokens
from headrace.bench.elastic_start import first_batches
from headrace.errors import ConfigError, FormatError
from headrace.feed import Feed
from headrace.order import ElasticBlend, ElasticOrder, OrderRules, Shard
from headrace.order.permutation import KeyedPermutation
from headrace.store import StoreWriter, TokenStore


def running_starts(lengths):
    return np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)])


def order_of(lengths, *, num_epochs=1, **rules):
    lengths = np.array(lengths, np.int32)
    return ElasticOrder(lengths, running_starts(lengths), OrderRules(**rules), num_epochs=num_epochs)


# -- the permutation ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 600), st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20))
def test_every_number_goes_to_a_place_of_its_own(size, key):
    permutation = KeyedPermutation(size, key)
    assert sorted(map(permutation, range(size))) == list(range(size))


@given(st.integers(2**40, 2**64), st.sets(st.integers(0, 2**40 - 1), min_size=20, max_size=40))
def test_large_ranges_too(size, numbers):
    permutation = KeyedPermutation(size, "large")
    places = {permutation(number) for number in numbers}
    assert len(places) == len(numbers)
    assert all(0 <= place < size for place in places)
    assert max(places) >= size // 4, "places fill the range, not a corner of it"


def test_its_numbers_are_a_format():
    """A checkpoint means the same sample for ever."""
    assert [KeyedPermutation(10, "seed 1234, epoch 0")(i) for i in range(10)] == [9, 3, 4, 1, 7, 2, 6, 0, 5, 8]
    billion = KeyedPermutation(10**9, "seed 1234, epoch 0")
    assert [billion(i) for i in (0, 1, 2, 10**8, 10**9 - 1)] == [806230224, 399411162, 820083719, 160495642, 254893542]


def test_all_orders_of_four_occur_about_equally_often():
    seen = Counter(tuple(map(KeyedPermutation(4, f"key {key}"), range(4))) for key in range(2400))
    assert len(seen) == 24
    assert min(seen.values()) >= 50
    assert max(seen.values()) <= 160


def test_neighbours_are_torn_apart():
    permutation = KeyedPermutation(5000, "x")
    steps = np.diff([permutation(i) for i in range(5000)])
    assert abs(np.abs(steps).mean() / 5000 - 1 / 3) < 0.02  # the mean distance of two independent numbers


# -- samples -----------------------------------------------------------------------------------------------------------

corpora = st.lists(st.integers(0, 30), min_size=1, max_size=25).filter(lambda lengths: sum(lengths) >= 9)


@given(corpora, st.integers(1, 8), st.booleans(), st.integers(0, 2**32 - 1))
def test_samples_tile_the_stream(lengths, step, extra, seed):
    order = order_of(lengths, sequence_length=step, add_extra_token=extra, seed=seed, num_samples=None)
    stream = [(document, offset) for document, length in enumerate(lengths) for offset in range(length)]
    expected = {tuple(stream[i * step : i * step + step + extra]) for i in range((len(stream) - extra) // step)}
    found = []
    for sample in range(len(order)):
        parts = order.parts(sample)
        assert all(part.length > 0 for part in parts)
        found.append(tuple((p.document, p.offset + i) for p in parts for i in range(p.length)))
    assert len(found) == len(expected)
    assert set(found) == expected


def test_epochs_are_whole_and_the_length_of_the_run_decides_nothing():
    lengths = [5, 30, 1, 12, 0, 7, 9, 22, 3]
    long = order_of(lengths, sequence_length=4, num_epochs=5)
    n = long.samples_per_epoch
    epochs = [[tuple(long.parts(e * n + i)) for i in range(n)] for e in range(5)]
    assert all(set(epoch) == set(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    short = order_of(lengths, sequence_length=4, num_samples=n + 3)
    assert [tuple(short.parts(i)) for i in range(len(short))] == (epochs[0] + epochs[1])[: n + 3]
    other = order_of(lengths, sequence_length=4, seed=7)
    assert [tuple(other.parts(i)) for i in range(n)] != epochs[0]


def test_a_split_takes_its_documents_alone():
    order = order_of([10] * 10, sequence_length=5, split="8,2", split_name="valid", add_extra_token=False)
    assert len(order) == 4
    assert {part.document for sample in range(4) for part in order.parts(sample)} == {8, 9}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 4)), max_size=4))
def test_other_data_sizes_in_the_middle_of_an_epoch(interruptions):
    order = order_of([5, 30, 1, 12, 0, 7, 9, 22, 3], sequence_length=4, num_epochs=2)
    consumed, seen = 0, []
    for rows, size, turns in [*interruptions, (1, 1, len(order))]:
        shards = [Shard(micro_batch_size=rows, data_rank=rank, data_size=size) for rank in range(size)]
        turns = min(turns, shards[0].num_micro_batches(len(order), consumed_samples=consumed))
        for turn in range(turns):
            seen += [tuple(order.parts(i)) for s in shards for i in s.micro_batch(turn, consumed_samples=consumed)]
        consumed += turns * rows * size
    assert seen == [tuple(order.parts(i)) for i in range(len(order))], "nothing replayed, nothing lost"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequence_length": 40}, "one sample needs 41 tokens, this part of the corpus holds 20"),
        ({"sequence_length": 4, "num_epochs": 0}, "`num_epochs` must be at least 1, got 0"),
        ({"sequence_length": 4, "split_name": "valid", "drop_last_partial": False}, "drops a last partial sample"),
    ],
)
def test_orders_without_a_meaning(arguments, message):
    with pytest.raises(ConfigError, match=message):
        order_of([12, 8], **arguments)


def test_a_gap_between_documents_is_named_where_it_is_met():
    lengths, starts = np.array([8, 8, 8], np.int32), np.array([0, 8, 20])
    order = ElasticOrder(lengths, starts, OrderRules(sequence_length=4, add_extra_token=False))
    with pytest.raises(FormatError, match=r"sequence 2 starts at token 20 .* the one before it ends at 16"):
        order._cut(12, 21)
    with pytest.raises(FormatError, match="sequence 1 ends at token 16 of its part, tokens to 20 needed"):
        order._cut(16, 20)


# -- nothing of the corpus's size --------------------------------------------------------------------------------------


class CountedArray:
    """An index of 10**7 equal documents that exists nowhere: it counts which entries are looked at."""

    def __init__(self, entry, size=10**7):
        self.entry, self.size, self.looks = entry, size, 0

    def __len__(self):
        return self.size

    def __getitem__(self, at):
        if isinstance(at, slice):
            found = [self.entry(i) for i in range(*at.indices(self.size))]
            self.looks += len(found)
            return np.array(found)
        assert 0 <= at < self.size
        self.looks += 1
        return self.entry(at)


def test_sample_a_hundred_million_of_a_billion_looks_at_a_few_entries_and_allocates_nothing():
    lengths = CountedArray(lambda i: 409_600)
    starts = CountedArray(lambda i: i * 409_600)
    tracemalloc.start()
    try:
        order = ElasticOrder(lengths, starts, OrderRules(sequence_length=4096, add_extra_token=False))
        assert len(order) == 10**9
        parts = order.parts(10**8)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(part.length for part in parts) == 4096
    assert lengths.looks + starts.looks <= 4 * np.log2(10**7)
    assert peak < 100_000


# -- from disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path):
    with StoreWriter(tmp_path / "corpus", np.uint16) as writer:
        for start, length in ((1, 30), (31, 7), (38, 63), (101, 1), (102, 50)):
            writer.add_document(np.arange(start, start + length))
    return str(tmp_path / "corpus")


def test_a_store_opened_without_walking_its_index_reads_the_same(corpus):
    walked, lazy = TokenStore(corpus), TokenStore(corpus, walk_index=False)
    with walked, lazy:
        assert lazy.lengths.base is not None, "mapped, not copied"
        assert (lazy.num_tokens, lazy.fingerprint()) == (walked.num_tokens, walked.fingerprint())
        for sequence in range(5):
            assert lazy.read(sequence).tolist() == walked.read(sequence).tolist()


def test_a_run_is_continued_without_touching_an_index_of_megabytes():
    """Ten million entries are the bench's; two hundred thousand would show just as well: 0.8 MB of lengths alone."""
    started = first_batches(num_documents=200_000, num_rounds=1, seed=1, clock=time.perf_counter_ns)
    assert started["summary"]["elastic_allocated_bytes"] < 100_000
    assert started["rows"][0]["num_samples"] == 20_000_000


@pytest.mark.parametrize("wrong", [-2, 3, 10_000])
def test_a_damaged_pointer_is_found_by_who_reads_it(corpus, wrong):
    pointers_at = 34 + 4 * 5
    with open(corpus + ".idx", "r+b") as stream:
        stream.seek(pointers_at + 8 * 2)
        stream.write(np.int64(wrong).tobytes())
    with TokenStore(corpus, walk_index=False) as store:
        assert store.read(1).tolist() == list(range(31, 38))
        with pytest.raises(FormatError, match=r"sequence 2 has 63 tokens from byte -?\d+ on; it must start"):
            store.read(2)


def test_a_feed_reads_it_and_goes_on_with_more_epochs(corpus):
    source = PackedTokens(corpus, seq_length=8, order="elastic", num_epochs=2)
    with Feed(source) as feed:
        rows, states = [], []
        for batch in feed:
            assert (batch["labels"] == batch["tokens"] + 1).all(), "each token occurs once, in its order"
            rows.append(batch["tokens"].ravel().tolist())
            states.append(feed.state_dict())
    per_epoch = (151 - 1) // 8
    assert len(rows) == 2 * per_epoch
    assert {token for row in rows[:per_epoch] for token in row} == set(range(1, 8 * per_epoch + 1))
    longer = PackedTokens(corpus, seq_length=8, order="elastic", num_epochs=3)
    with Feed(longer) as feed:
        feed.load_state_dict(states[20])
        again = [batch["tokens"].ravel().tolist() for batch in feed]
    assert again[: len(rows) - 21] == rows[21:]
    assert len(again) == 3 * per_epoch - 21


def test_whole_documents_have_no_elastic_order(corpus):
    with pytest.raises(ConfigError, match="order='elastic' cuts documents where a row ends"):
        PackedTokens(corpus, seq_length=8, order="elastic", documents="whole").open_batches()


# -- blends ------------------------------------------------------------------------------------------------------------


class Numbers:
    """An order that tells its samples apart, and no more."""

    row_tokens = 5

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def parts(self, sample):
        return [sample]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 100))
def test_a_blend_takes_each_corpus_in_turn_and_in_proportion(weights, num_samples):
    blend = ElasticBlend([Numbers(num_samples)] * len(weights), weights, num_samples=num_samples)
    drawn = [0] * len(weights)
    for sample in range(num_samples):
        corpus, number = blend.choice(sample)
        assert number == drawn[corpus], "each corpus in its own order, nothing left out"
        assert blend.parts(sample) == [number]
        drawn[corpus] += 1
        num_forks, total = len(weights).bit_length(), sum(weights)
        for taken, weight in zip(drawn, weights, strict=True):
            assert abs(taken * total - weight * (sample + 1)) < (num_forks + 0.01) * total


@pytest.mark.parametrize(
    ("sizes", "weights", "message"),
    [
        ([9, 9], [1.0], "2 corpora need as many weights"),
        ([9, 9], [1.0, 0.0], "must be above 0"),
        ([9, 2], [1.0, 1.0], "draws 3 samples from corpus 1, which has 2"),
    ],
)
def test_blends_without_a_meaning(sizes, weights, message):
    with pytest.raises(ConfigError, match=message):
        ElasticBlend([Numbers(size) for size in sizes], weights, num_samples=5)
