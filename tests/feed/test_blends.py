"""Blends of corpora as a source: Megatron's rows, any dtype, refused where they mean nothing, continued anywhere."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import PackedTokens
from headrace.errors import ConfigError
from headrace.feed import Feed
from headrace.order import cost_of
from headrace.store import StoreWriter

SIZES = {"wiki": (400, 30), "code": (300, 12), "math": (900, 80)}
"""Tokens, and the longest document."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each token occurs once in all of them, so that a batch says where its tokens are from; three dtypes."""
    random = np.random.default_rng(5)
    folder, first = tmp_path_factory.mktemp("corpora"), 1
    for (name, (size, longest)), dtype in zip(SIZES.items(), (np.uint16, np.int32, np.int16), strict=True):
        with StoreWriter(folder / name, dtype) as writer:
            while writer.num_tokens < size:
                length = int(random.integers(1, longest))
                writer.add_document(np.arange(length) + first + writer.num_tokens)
        first += writer.num_tokens
    return {name: str(folder / name) for name in SIZES}


def rows(source: PackedTokens, **shard: Any) -> list[list[int]]:
    """Of every batch: tokens and the last label."""
    batches = source.open_batches(**shard)
    found = []
    for number in range(len(batches)):
        batch = batches[number]
        found += [[*row, last] for row, last in zip(batch["tokens"].tolist(), batch["labels"][:, -1], strict=True)]
    return found


def of_corpus(row: list[int], corpora: dict[str, str]) -> str:
    ends = dict(zip(corpora, itertools.accumulate(size_of(prefix) for prefix in corpora.values()), strict=True))
    names = {next(name for name, end in ends.items() if token <= end) for token in row if token}
    [name] = names
    return name


def size_of(prefix: str) -> int:
    from headrace.store import TokenStore

    with TokenStore(prefix) as store:
        return store.num_tokens


# -- Megatron's --------------------------------------------------------------------------------------------------------


@st.composite
def megatron_blends(draw: st.DrawFn) -> dict[str, Any]:
    num_corpora = draw(st.integers(1, 3))
    return {
        "documents": [draw(st.lists(st.integers(1, 25), min_size=3, max_size=12)) for _ in range(num_corpora)],
        "weights": draw(
            st.none()
            | st.lists(st.sampled_from([0.1, 0.3, 1.0, 7.0, 30.0]), min_size=num_corpora, max_size=num_corpora)
        ),
        "num_samples": draw(st.integers(1, 60)),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "seq_length": draw(st.integers(1, 12)),
        "add_extra_token": draw(st.booleans()),
    }


@given(blend=megatron_blends())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_rows_are_those_of_megatrons_blended_dataset(
    tmp_path_factory: pytest.TempPathFactory, blend: dict[str, Any]
) -> None:
    """megatron-core 0.16.1's builder over files of two dtypes, every row from the first to the last."""
    pytest.importorskip("megatron.core.datasets.gpt_dataset", reason="needs megatron-core 0.16.1")
    from tests.order.oracle import dataset_from_files

    folder = tmp_path_factory.mktemp("blend")
    prefixes = []
    for number, lengths in enumerate(blend["documents"]):
        prefixes.append(str(folder / f"corpus{number}"))
        with StoreWriter(prefixes[-1], (np.uint16, np.int32)[number % 2]) as writer:
            for length in lengths:
                writer.add_document(np.arange(length) + 2 + writer.num_tokens + 300 * number)
    weights = blend["weights"]
    settings_of_both = {"seq_length": blend["seq_length"], "add_extra_token": blend["add_extra_token"]}
    words = prefixes if weights is None else [str(word) for pair in zip(weights, prefixes) for word in pair]  # noqa: B905
    source = PackedTokens.from_data_path(
        words, seed=blend["seed"], num_samples=blend["num_samples"], pad=1, **settings_of_both
    )
    try:
        batches = source.open_batches()
    except ConfigError:
        # Less than one sample in a corpus is a dataset of length 0 for Megatron.
        assert any(sum(one) <= blend["seq_length"] for one in blend["documents"])
        return
    dataset = dataset_from_files(
        prefixes,
        weights,
        blend["num_samples"],
        split="1,0,0",
        sequence_length=blend["seq_length"],
        random_seed=blend["seed"],
        add_extra_token_to_sequence=blend["add_extra_token"],
    )[0]
    assert len(batches) == len(dataset)
    for number in range(len(batches)):
        batch, theirs = batches[number], dataset[number]
        assert batch["tokens"][0].tolist() == theirs["tokens"].tolist()
        assert batch["labels"][0].tolist() == theirs["labels"].tolist()


# -- each order --------------------------------------------------------------------------------------------------------

ORDERS: dict[str, dict[str, Any]] = {
    "megatron": {},
    "elastic": {"order": "elastic"},
    "whole": {"documents": "whole", "pad": 0},
}


@pytest.mark.parametrize("order", ORDERS)
def test_samples_come_in_proportion_and_whole(corpora: dict[str, str], order: str) -> None:
    blend = [(6.0, corpora["wiki"]), (3, corpora["code"]), (1, corpora["math"])]
    source = PackedTokens(blend, seq_length=8, num_samples=200, **ORDERS[order])
    taken = Counter(of_corpus(row, corpora) for row in rows(source)[:200])
    for name, wanted in (("wiki", 120), ("code", 60), ("math", 20)):
        assert abs(taken[name] - wanted) <= 2


@pytest.mark.parametrize("order", ["elastic", "whole"])
def test_without_weights_an_epoch_takes_each_sample_once(corpora: dict[str, str], order: str) -> None:
    singles = [rows(PackedTokens(prefix, seq_length=8, **ORDERS[order])) for prefix in corpora.values()]
    once = rows(PackedTokens(list(corpora.values()), seq_length=8, **ORDERS[order]))
    assert Counter(map(tuple, once)) == Counter(tuple(row) for single in singles for row in single)
    source = PackedTokens(list(corpora.values()), seq_length=8, num_epochs=3, **ORDERS[order])
    thrice = rows(source)
    assert thrice[: len(once)] == once, "the length of the run decides nothing"
    for epoch in range(3):
        of_epoch = thrice[epoch * len(once) : (epoch + 1) * len(once)]
        assert Counter(t for row in of_epoch for t in row) == Counter(t for row in once for t in row)
    longer = PackedTokens(list(corpora.values()), seq_length=8, num_samples=len(once) + 5, **ORDERS[order])
    assert rows(longer) == thrice[: len(once) + 5]
    assert longer.identity() == source.identity()


@pytest.mark.parametrize("order", ORDERS)
def test_targets_of_each_corpus_lie_beside_its_tokens(corpora: dict[str, str], order: str, tmp_path: Path) -> None:
    from headrace.store import TokenStore

    for name, prefix in corpora.items():
        with TokenStore(prefix) as store, StoreWriter(tmp_path / name, np.int32) as writer:
            for sequence in range(len(store)):
                tokens = store.read(sequence).astype(np.int64)
                writer.add_document(np.where(tokens % 3, tokens, -100))
    blend = [(1, prefix) for prefix in corpora.values()]
    targets = [str(tmp_path / name) for name in corpora]
    source = PackedTokens(blend, targets=targets, seq_length=8, num_samples=60, **ORDERS[order])
    batches = source.open_batches()
    for number in range(len(batches)):
        batch = batches[number]
        learnt = batch["loss_mask"] > 0
        assert np.array_equal(batch["labels"][learnt], batch["tokens"][learnt] + 1)
        assert (batch["labels"][learnt] % 3 > 0).all()
    with pytest.raises(ConfigError, match="one pair for each corpus: 3 corpora, got 2"):
        PackedTokens(blend, targets=targets[:2], seq_length=8, num_samples=60).open_batches()
    assert source.identity() != PackedTokens(blend, seq_length=8, num_samples=60, **ORDERS[order]).identity()


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_balanced_steps_hold_the_samples_that_the_order_gave_them(
    corpora: dict[str, str], order: str, blended: bool
) -> None:
    """dp x 2 micro batches x 2 rows: dealt out by what `cu_seqlens` says, the same rows in each step."""
    prefix = [(2, corpora["wiki"]), (1, corpora["math"])] if blended else corpora["math"]
    settings_of_both = {"seq_length": 16, "num_samples": 48, **ORDERS[order]}
    stored = rows(PackedTokens(prefix, **settings_of_both))
    source = PackedTokens(
        prefix, **settings_of_both, balance="dp", micro_batches_per_step=2, micro_batch_size=2, attention_cost=0.1
    )
    ranks = [source.open_batches(data_rank=rank, data_size=3) for rank in range(3)]
    for step in range(4):
        dealt: list[list[int]] = []
        costs = []
        for batches in ranks:
            cost = 0
            for turn in (2 * step, 2 * step + 1):
                batch = batches[turn]
                cost += cost_of(np.diff(batch["cu_seqlens"]).tolist(), 0.1)
                dealt += [
                    [*row, last] for row, last in zip(batch["tokens"].tolist(), batch["labels"][:, -1], strict=True)
                ]
            costs.append(cost)
        assert sorted(dealt) == sorted(stored[12 * step : 12 * step + 12])
        every = [ranks[0]._cost(sample) for sample in range(12 * step, 12 * step + 12)]
        assert sum(costs) == sum(every)
        as_stored = [sum(every[turn * 6 + 2 * rank + row] for turn in (0, 1) for row in (0, 1)) for rank in range(3)]
        assert max(costs) <= max(as_stored)


# -- continued ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_a_feed_goes_on_in_the_middle_with_another_number_of_shards(corpora: dict[str, str], order: str) -> None:
    blend = [(0.7, corpora["wiki"]), (0.3, corpora["code"])]
    source = PackedTokens(blend, seq_length=8, num_samples=90, **ORDERS[order])
    whole = rows(source)
    with Feed(source, data_rank=0, data_size=2) as feed:
        taken = [next(feed).samples for _ in range(5)]
        state = feed.state_dict()
    assert taken == [(2 * turn,) for turn in range(5)]
    assert state["consumed_samples"] == 10
    rest = []
    with Feed(source) as feed:
        feed.load_state_dict(state)
        rest = [[*batch["tokens"][0].tolist(), int(batch["labels"][0, -1])] for batch in feed]
    assert rest == whole[10:]


def test_a_changed_corpus_weight_or_order_of_corpora_is_refused(corpora: dict[str, str], tmp_path: Path) -> None:
    def blend(*weights: float, **other: Any) -> PackedTokens:
        pairs = list(zip(weights, corpora.values(), strict=False))
        return PackedTokens(
            other.pop("pairs", pairs), **{"seq_length": 8, "num_samples": 60, "order": "elastic"} | other
        )

    with Feed(blend(0.7, 0.3)) as feed:
        next(feed)
        state = feed.state_dict()
    with StoreWriter(tmp_path / "code", np.int32) as writer:
        writer.add_document(np.arange(size_of(corpora["code"])) + 1)
    others = [
        blend(0.6, 0.4),
        blend(0.7, 0.2, 0.1),
        blend(pairs=[(0.3, corpora["code"]), (0.7, corpora["wiki"])]),
        blend(pairs=[(0.7, corpora["wiki"]), (0.3, str(tmp_path / "code"))]),
        blend(pairs=[corpora["wiki"], corpora["code"]]),
        blend(pairs=corpora["wiki"]),
    ]
    for other in others:
        assert other.identity() != state["source"]
    with Feed(others[0]) as feed:
        feed.load_state_dict(state)
        with pytest.raises(
            ConfigError, match=r"other data: it says 'corpora 0\.7 of .* this feed reads 'corpora 0\.6 of"
        ):
            next(feed)
    same = blend(70, 30, num_samples=80)
    assert same.identity() == state["source"], "weights count in proportion, and an elastic run may be longer"


# -- without a meaning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "other", "message"),
    [
        ([(0.0, "a"), (1.0, "b")], {}, "the weight of 'a' must be a number above 0, got 0.0; leave out a corpus"),
        ([(1.0, "a"), (-2, "b")], {}, "the weight of 'b' must be a number above 0, got -2"),
        ([(float("nan"), "a")], {}, "the weight of 'a' must be a number above 0, got nan"),
        ([(float("inf"), "a")], {}, "the weight of 'a' must be a number above 0, got inf"),
        ([(True, "a")], {}, "the weight of 'a' must be a number above 0, got True"),
        ([("0.7", "a")], {}, "the weight of 'a' must be a number above 0, got '0.7'"),
        ([(0.7, "a"), "b"], {}, "either all corpora of a blend have a weight or none, 'b' has none"),
        ([("a", 0.7)], {}, r"a corpus of a blend is \(weight, prefix\), such as \(0.7, 'wiki'\), got \('a', 0.7\)"),
        ([(0.7, "a", "b")], {}, r"a corpus of a blend is \(weight, prefix\)"),
        ([(0.7, "a"), (0.3, "./x/../a.bin")], {}, "'a' and './x/../a.bin' are one corpus; it is in the blend twice"),
        (["a", "b", "a"], {}, "'a' is in the blend twice; name it once, with the sum of its weights"),
        ([], {}, "give a prefix, or a blend such as"),
        (7, {}, "give a prefix, or a blend such as .*, got 7"),
        ([(1, "a"), (1, "b")], {"num_samples": None}, "ends nowhere by itself: give num_samples"),
        ([(1, "a"), (1, "b")], {"num_epochs": 2}, "num_epochs=2 is not for this blend of 2 corpora: give num_samples"),
        (["a", "b"], {"num_epochs": 2, "num_samples": None}, "num_epochs=2 is not for this blend of 2 corpora"),
        ([(1, "nowhere")], {}, "no token store at 'nowhere': nowhere.idx does not exist"),
    ],
)
def test_blends_without_a_meaning(prefix: Any, other: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PackedTokens(prefix, **{"seq_length": 8, "num_samples": 60} | other).open_batches()


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ([(0.7, "wiki"), (0.0, "code")], "the weight of 'code' must be a number above 0, got 0.0"),
        ([(0.7, "wiki"), (0.3, "code")], "a blend by weight ends nowhere by itself: give num_samples, .* got None"),
    ],
)
def test_a_feed_says_so_before_it_starts_anything(prefix: Any, message: str) -> None:
    """Nor does it look for the corpora, which do not exist."""
    with pytest.raises(ConfigError, match=message):
        Feed(PackedTokens(prefix, seq_length=8))


@pytest.mark.parametrize(
    ("words", "prefix"),
    [
        ("wiki", "wiki"),
        (["wiki"], "wiki"),
        ("30 wiki 70 code", [(30.0, "wiki"), (70.0, "code")]),
        (["0.3", "wiki", "0.7", "code"], [(0.3, "wiki"), (0.7, "code")]),
        ("wiki code", ["wiki", "code"]),
    ],
)
def test_megatrons_data_path(words: Any, prefix: Any) -> None:
    assert PackedTokens.from_data_path(words, seq_length=8) == PackedTokens(prefix, seq_length=8)
    with pytest.raises(ConfigError, match="either all corpora of a blend have a weight or none"):
        PackedTokens.from_data_path("30 wiki code math", seq_length=8)
