"""Requests without an answer end in a named error with need, have and knob, never in a loop or an empty run."""

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.order import (
    BlendedOrder,
    EpochOrder,
    MegatronOrder,
    OrderRules,
    blend_megatron,
    parse_blend,
    split_range,
)
from headrace.order.draw import BlendIndex

LENGTHS = np.array([5, 3, 8], np.int32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 0}, "`sequence_length` must be 1 to 2147483646, got 0"),
        ({"sequence_length": 2**31 - 1}, "`sequence_length`"),
        ({"seed": -1}, "`seed` must be 0 to 4294967295, got -1"),
        ({"seed": 2**32}, "`seed`"),
        ({"num_samples": -1}, "`num_samples` must not be negative, got -1"),
        ({"split_name": "dev"}, "`split_name` must be one of train, valid, test, got 'dev'"),
        ({"drop_last_partial": False}, "kept for valid only, `split_name` is 'train'"),
    ],
)
def test_rules_that_mean_nothing(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OrderRules(**{"sequence_length": 4, **options})


def test_less_than_one_sample_names_need_have_and_knobs() -> None:
    with pytest.raises(
        ConfigError, match=r"needs 17 tokens, this part of the corpus holds 16 \(documents: 3\); lower `seq"
    ):
        MegatronOrder(LENGTHS, OrderRules(sequence_length=16))
    assert len(MegatronOrder(LENGTHS, OrderRules(sequence_length=15))) == 1
    # The same corpus, repeated as Megatron does.
    assert len(MegatronOrder(LENGTHS, OrderRules(sequence_length=16, num_samples=1))) == 1


@pytest.mark.parametrize("num_samples", [None, 0, 5])
def test_documents_without_tokens(num_samples: int | None) -> None:
    with pytest.raises(ConfigError, match=r"holds 0 \(documents: 2\)"):
        MegatronOrder(np.zeros(2, np.int32), OrderRules(sequence_length=4, num_samples=num_samples))


def test_a_corpus_without_documents() -> None:
    with pytest.raises(ConfigError, match="holds none of 0 documents"):
        MegatronOrder(np.zeros(0, np.int32), OrderRules(sequence_length=4, num_samples=3))


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "1,2,3,4", "-1,2", "nan", "inf,1", "1;1"])
def test_a_split_that_cannot_be_read(split: str) -> None:
    with pytest.raises(ConfigError, match="`split` must be one to three weights"):
        split_range(10, split, "train")


def test_a_part_without_weight() -> None:
    with pytest.raises(ConfigError, match="the test part of split '1,1' holds none of 10 documents"):
        split_range(10, "1,1", "test")
    with pytest.raises(ConfigError, match="`split_name`"):
        split_range(10, None, "dev")


@pytest.mark.parametrize("sample", [-1, 3])
def test_samples_that_do_not_exist(sample: int) -> None:
    rules = OrderRules(sequence_length=5)
    order = MegatronOrder(LENGTHS, rules)
    assert len(order) == 3
    for asked in (
        order,
        BlendedOrder([order], BlendIndex(np.zeros(3, np.int16), np.arange(3))),
        EpochOrder(LENGTHS, rules, num_epochs=1),
    ):
        with pytest.raises(IndexError, match=f"sample {sample} of 3"):
            asked.parts(sample)


@pytest.mark.parametrize(
    ("weights", "num_samples", "message"),
    [
        ([1.0], 10, "2 corpora need 2 weights, got 1"),
        ([1.0, 0.0], 10, "must be above 0"),
        ([1.0, float("nan")], 10, "must be above 0"),
        ([1.0, 1.0], None, "needs `num_samples`"),
    ],
)
def test_blends_that_mean_nothing(weights: list[float], num_samples: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        blend_megatron([LENGTHS, LENGTHS], OrderRules(sequence_length=4, num_samples=num_samples), weights=weights)


def test_a_blend_of_nothing_and_of_too_much() -> None:
    rules = OrderRules(sequence_length=4)
    with pytest.raises(ConfigError, match="1 to 32766 corpora, got 0"):
        blend_megatron([], rules)
    with pytest.raises(ConfigError, match="got 32767"):
        blend_megatron([LENGTHS] * 32767, rules)
    with pytest.raises(ConfigError, match="2 corpora need as many caches, got 1"):
        blend_megatron([LENGTHS, LENGTHS], rules, caches=[None])


def test_a_blend_that_draws_more_than_there_is() -> None:
    order = MegatronOrder(LENGTHS, OrderRules(sequence_length=5))
    with pytest.raises(ConfigError, match="draws 4 samples from corpus 0, which has 3; raise `surplus`"):
        BlendedOrder([order], BlendIndex(np.zeros(4, np.int16), np.arange(4)))


def test_a_blend_of_different_rows() -> None:
    orders = [MegatronOrder(LENGTHS, OrderRules(sequence_length=length)) for length in (4, 5)]
    with pytest.raises(ConfigError, match=r"agree on tokens per row, got \[5, 6\]"):
        BlendedOrder(orders, BlendIndex(np.zeros(1, np.int16), np.zeros(1, np.int64)))


def test_data_path_arguments() -> None:
    assert parse_blend(["a"]) == (["a"], None)
    assert parse_blend(["30", "a", "70", "b "]) == (["a", "b"], [30.0, 70.0])
    assert parse_blend(["a", "b"]) == (["a", "b"], None)
    assert parse_blend(["0.5", "a", "b"]) == (["0.5", "a", "b"], None)
    with pytest.raises(ConfigError, match="either all corpora of a blend have a weight or none"):
        parse_blend(["30", "a", "x", "b"])
    with pytest.raises(ConfigError, match="at least one prefix"):
        parse_blend([])


def test_epochs_that_mean_nothing() -> None:
    with pytest.raises(ConfigError, match="`num_epochs` must be at least 1, got 0"):
        EpochOrder(LENGTHS, OrderRules(sequence_length=4), num_epochs=0)
    with pytest.raises(ConfigError, match="`num_samples` must be None, got 7"):
        EpochOrder(LENGTHS, OrderRules(sequence_length=4, num_samples=7), num_epochs=2)
