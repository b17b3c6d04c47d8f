"""Equal to megatron-core 0.16.1: index arrays bit for bit and rows token by token, for thousands of random corpora."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.order import MegatronOrder, OrderRules, blend_megatron, split_range
from headrace.order.draw import Drawing
from headrace.order.sample_index import build_sample_index
from headrace.store import StoreWriter, TokenStore, standard_library
from headrace.store.text import find_texts

from .oracle import Documents, dataset_from_files, dataset_in_memory, row

helpers = pytest.importorskip("megatron.core.datasets.helpers", reason="needs megatron-core 0.16.1")


@st.composite
def orders(draw: st.DrawFn) -> tuple[np.ndarray, OrderRules]:
    """A corpus with a few long and, sometimes, empty documents, and rules that ask it for something possible or not."""
    longest = draw(st.sampled_from([3, 12, 60]))
    shortest = draw(st.sampled_from([0, 1]))
    raw = np.frombuffer(draw(st.binary(min_size=1, max_size=25)), np.uint8)
    lengths = (shortest + raw % (longest + 1 - shortest)).astype(np.int32)
    split_name = draw(st.sampled_from(["train", "train", "valid", "test"]))
    rules = OrderRules(
        sequence_length=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 2**32 - 1)),
        num_samples=draw(st.none() | st.integers(0, 120)),
        split=draw(st.none() | st.sampled_from(["1,0,0", "80,10,10", "969,30,1", "34,33,33", "5,5"])),
        split_name=split_name,
        add_extra_token=draw(st.booleans()),
        drop_last_partial=split_name != "valid" or draw(st.booleans()),
    )
    return lengths, rules


def theirs(lengths: np.ndarray, rules: OrderRules) -> object:
    return dataset_in_memory(
        lengths,
        split_range(len(lengths), rules.split, rules.split_name),
        split_name=rules.split_name,
        num_samples=rules.num_samples,
        sequence_length=rules.sequence_length,
        random_seed=rules.seed,
        add_extra_token_to_sequence=rules.add_extra_token,
        drop_last_partial_validation_sequence=rules.drop_last_partial,
    )


def row_of_parts(order: MegatronOrder, sample: int) -> np.ndarray:
    documents = Documents(np.empty(0))
    parts = [documents.get(part.document, part.offset, part.length) for part in order.parts(sample)]
    short = order.row_tokens - sum(part.length for part in order.parts(sample))
    return np.concatenate([*parts, np.full(short, 1)])  # 1 is the oracle tokenizer's pad


@given(orders())
@settings(max_examples=2000, deadline=None)
def test_index_arrays_and_rows_equal_those_of_gptdataset(case: tuple[np.ndarray, OrderRules]) -> None:
    lengths, rules = case
    try:
        order = MegatronOrder(lengths, rules)
    except ConfigError:
        # Nothing can be delivered: an empty part, no token, or less than one sample.
        tokens = sum(lengths[d] for d in documents_or_none(lengths, rules))
        assert tokens - rules.extra < (rules.sequence_length if rules.drop_last_partial else 1)
        return
    # Megatron stops at its own assertion where the very last document is empty and a partial sample was kept.
    assume(rules.drop_last_partial or lengths[order.document_index[-1]] > 0)
    dataset = theirs(lengths, rules)
    assert_same(order.document_index, dataset.document_index)
    assert_same(order.sample_index, dataset.sample_index)
    assert_same(order.shuffle_index, dataset.shuffle_index)
    assert len(order) == len(dataset)
    for sample in {0, len(order) // 2, len(order) - 1}:
        assert row_of_parts(order, sample).tolist() == row(dataset, sample).tolist()


def documents_or_none(lengths: np.ndarray, rules: OrderRules) -> range:
    try:
        return split_range(len(lengths), rules.split, rules.split_name)
    except ConfigError:
        return range(0)


def assert_same(ours: np.ndarray, megatrons: np.ndarray) -> None:
    assert ours.dtype == megatrons.dtype
    assert np.array_equal(ours, megatrons)


@pytest.mark.parametrize("sequence_length", [7, 100, 4096, 300_000])
@pytest.mark.parametrize("extra", [0, 1])
def test_a_long_tailed_corpus(sequence_length: int, extra: int) -> None:
    """Empty documents in front, and in the third corpus far more than 2**31 tokens."""
    random = np.random.default_rng(7)
    for scale, longest in ((2.0, 2_000), (6.0, 900_000), (11.0, 2**31 - 1)):
        lengths = np.clip(random.lognormal(scale, 2.0, 150_000), 0, longest).astype(np.int32)
        lengths[:3] = 0
        tokens = int(lengths.sum(dtype=np.int64))
        num_samples = (tokens - extra) // sequence_length
        if num_samples > 3_000_000:
            continue
        documents = np.arange(len(lengths), dtype=np.int32)
        expected = helpers.build_sample_idx(lengths, documents, sequence_length, 1, tokens, True, extra == 1)
        ours = build_sample_index(lengths, sequence_length=sequence_length, num_samples=num_samples, extra=extra)
        assert_same(ours, expected)


@pytest.mark.parametrize(
    ("sequence_length", "tokens", "off_by"), [(1000, 20_000_002, -1), (4097, 536_915_948, 1), (1024, 20_480_001, 0)]
)
def test_the_single_precision_of_a_kept_partial_sample_is_megatrons(
    sequence_length: int, tokens: int, off_by: int
) -> None:
    """Beyond 2**24 tokens Megatron's count of samples may be one off; a row past the end holds the last token alone."""
    lengths = np.full(8, tokens // 8, np.int32)
    lengths[3] += tokens % 8
    rules = OrderRules(sequence_length=sequence_length, seed=5, split_name="valid", drop_last_partial=False)
    order, dataset = MegatronOrder(lengths, rules), theirs(lengths, rules)
    assert len(order) - -(-(tokens - 1) // sequence_length) == off_by
    assert_same(order.sample_index, dataset.sample_index)
    last = int(np.argmax(order.shuffle_index))
    assert row_of_parts(order, last).tolist() == row(dataset, last).tolist()


# Blends.


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(1, 400))
def test_choices_by_weight_equal_the_helper(weights: list[int], size: int) -> None:
    shares = (np.array(weights, np.float64) / np.sum(np.array(weights, np.float64))).tolist()
    corpus, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(corpus, sample, shares, len(shares), size, False)
    ours = Drawing(weights=shares, size=size).draw()
    assert_same(ours.corpus_index, corpus)
    assert_same(ours.corpus_sample_index, sample)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_exhaustive_choices_equal_the_helper(sizes: list[int]) -> None:
    corpus, sample = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
    helpers.build_exhaustive_blending_indices(corpus, sample, sizes, len(sizes))
    ours = Drawing(weights=sizes, size=None).draw()
    assert_same(ours.corpus_index, corpus)
    assert_same(ours.corpus_sample_index, sample)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[TokenStore]:
    random = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("stores")
    opened = []
    for name, longest in (("a", 80), ("b", 12), ("c", 300)):
        with StoreWriter(folder / name, np.uint16) as writer:
            for length in random.integers(1, longest, 40):
                writer.add_document(random.integers(2, 900, length))
        opened.append(TokenStore(folder / name))
    return opened


def tokens_of(stores: list[TokenStore], order: object, sample: int) -> list[int]:
    ids = []
    for document, offset, length, corpus in order.parts(sample):
        ids += stores[corpus].read(document, offset, length).tolist()
    return ids


@pytest.mark.parametrize(
    ("which", "weights", "size"),
    [
        ([0], None, None),
        ([0], None, 500),
        ([0], [3.0], 100),
        ([0, 1], [0.6, 0.4], 300),
        ([2, 0, 1], [1.0, 2.0, 5.0], 257),
        ([0, 1, 2], None, None),
        ([0, 2], None, 90),
        ([0, 2], None, 10**6),
        ([1, 1, 2], [0.1, 0.1, 0.1], 77),
    ],
)
@pytest.mark.parametrize("split", ["1,0,0", "70,20,10"])
def test_whole_datasets_from_files_deliver_the_same_rows(
    stores: list[TokenStore], which: list[int], weights: list | None, size: int | None, split: str, tmp_path: Path
) -> None:
    chosen = [stores[i] for i in which]
    datasets = dataset_from_files(
        [store.prefix for store in chosen],
        weights,
        size,
        split=split,
        sequence_length=24,
        random_seed=11,
        path_to_cache=str(tmp_path) if len(which) == 1 and weights is None else None,
    )
    for split_name, dataset in zip(("train", "valid", "test"), datasets, strict=True):
        if dataset is None:
            continue
        rules = OrderRules(sequence_length=24, seed=11, num_samples=size, split=split, split_name=split_name)
        try:
            order = blend_megatron([store.lengths for store in chosen], rules, weights=weights)
        except ConfigError:
            # Megatron's answer to a part with less than one sample is a dataset of length 0, alone or in a blend.
            parts = [split_range(store.num_sequences, split, split_name) for store in chosen]
            assert any(
                store.lengths[part.start : part.stop].sum() < 25 for store, part in zip(chosen, parts, strict=True)
            )
            continue
        assert len(order) == len(dataset)
        for sample in sorted({*range(0, len(order), max(1, len(order) // 40)), len(order) - 1}):
            expected = dataset[sample]
            ids = tokens_of(chosen, order, sample)
            assert ids[:-1] == expected["tokens"].tolist()
            assert ids[1:] == expected["labels"].tolist()


def test_every_row_of_real_text_is_megatrons(tmp_path: Path) -> None:
    """Source files of the standard library, a byte a token: real lengths over four orders of magnitude, two epochs."""
    with StoreWriter(tmp_path / "text", np.uint16) as writer:
        for path in find_texts(standard_library(), "*.py")[:250]:
            writer.add_document(np.frombuffer(path.read_bytes(), np.uint8))
    store = TokenStore(tmp_path / "text")
    samples = int(1.5 * store.num_tokens) // 4096
    dataset = dataset_from_files(
        [store.prefix], None, samples, split="1", sequence_length=4096, random_seed=1234, path_to_cache=str(tmp_path)
    )[0]
    order = MegatronOrder(store.lengths, OrderRules(sequence_length=4096, num_samples=samples, split="1"))
    assert order.plan.num_epochs == 2
    assert len(order) == len(dataset) > 500
    expected = np.empty(4097, np.uint16)
    for sample in range(len(order)):
        filled = 0
        for part in order.parts(sample):
            filled += store.read_into(expected[filled:], part.document, part.offset, part.length)
        assert filled == 4097
        assert np.array_equal(row(dataset, sample), expected)


def test_a_blend_keeps_its_rules_per_corpus(stores: list[TokenStore]) -> None:
    rules = OrderRules(sequence_length=24, num_samples=300, seed=11)
    blend = blend_megatron([store.lengths for store in stores[:2]], rules, weights=[0.6, 0.4])
    assert [len(order) for order in blend.orders] == [
        len(MegatronOrder(store.lengths, replace(rules, num_samples=wanted)))
        for store, wanted in zip(stores, (181, 121), strict=False)
    ]
