"""Orders, rows and blends with known answers (tests/vectors/gpt_dataset.json, made by megatron-core 0.16.1)."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.order import MegatronOrder, OrderRules, SampleOrder, blend_megatron, requested_per_corpus, split_range
from headrace.order.split import normalize

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "gpt_dataset.json").read_text())
CORPORA = VECTORS["corpora"]


def lengths_of(corpus: str) -> np.ndarray:
    return np.array([len(document) for document in CORPORA[corpus]], np.int32)


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def rows_of(order: SampleOrder, corpora: list[str]) -> np.ndarray:
    """All rows, int64, padded with -1 as the vectors are."""
    rows = np.full((len(order), order.row_tokens), -1, np.int64)
    for sample, row in enumerate(rows):
        filled = 0
        for document, offset, length, corpus in order.parts(sample):
            row[filled : filled + length] = CORPORA[corpora[corpus]][document][offset : offset + length]
            filled += length
    return rows


def rules_of(case: dict) -> OrderRules:
    return OrderRules(
        sequence_length=case["sequence_length"],
        seed=case["seed"],
        num_samples=case["num_samples"],
        split=case["split"],
        split_name=case["split_name"],
        add_extra_token=case["add_extra_token"],
        drop_last_partial=case.get("drop_last_partial", True),
    )


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_order_of_one_corpus(case: dict) -> None:
    order = MegatronOrder(lengths_of(case["corpus"]), rules_of(case))
    assert order.plan.documents == range(*case["document_range"])
    assert order.plan.tokens_per_epoch == case["tokens_per_epoch"]
    assert order.plan.num_epochs == case["num_epochs"]
    assert len(order) == case["length"]
    assert order.plan.last_epoch_apart == case["final_epoch_shuffled_apart"]
    for name in ("document_index", "sample_index", "shuffle_index"):
        if name in case:
            assert getattr(order, name).tolist() == case[name]
    assert sha256(order.document_index) == case["sha256"]["document_index_int32"]
    assert sha256(order.sample_index) == case["sha256"]["sample_index_int32"]
    assert sha256(order.shuffle_index) == case["sha256"]["shuffle_index_uint32"]

    rows = rows_of(order, [case["corpus"]])
    assert rows[: len(case["rows"])].tolist() == case["rows"]
    if "last_row" in case:
        assert rows[-1].tolist() == case["last_row"]
    assert [sha256(row)[:16] for row in rows[: len(case["row_sha256_first16"])]] == case["row_sha256_first16"]
    assert sha256(rows) == case["sha256"]["all_rows_int64"]
    for sample, documents in enumerate(case["rows_document_ids"]):
        assert [part.document for part in order.parts(sample)] == documents


@pytest.mark.parametrize("case", VECTORS["blends"], ids=lambda case: case["name"])
def test_order_of_a_blend(case: dict) -> None:
    rules = OrderRules(
        sequence_length=case["sequence_length"], seed=case["seed"], num_samples=case["size"], split=case["split"]
    )
    blend = blend_megatron([lengths_of(corpus) for corpus in case["corpora"]], rules, weights=case["weights"])
    if case["weights"]:
        shares = normalize(case["weights"])
        assert requested_per_corpus(shares, case["size"], surplus=0.005) == case["requested_per_corpus"]
    assert len(blend) == case["length"]
    assert [len(order) for order in blend.orders] == case["corpus_lengths"]
    assert [order.plan.num_epochs for order in blend.orders] == case["corpus_num_epochs"]
    assert blend.corpus_index[:100].tolist() == case["dataset_index"]
    assert blend.corpus_sample_index[:100].tolist() == case["dataset_sample_index"]
    assert sha256(blend.corpus_index) == case["dataset_index_int16_sha256"]
    assert sha256(blend.corpus_sample_index) == case["dataset_sample_index_int64_sha256"]
    rows = rows_of(blend, case["corpora"])
    assert rows[: len(case["rows"])].tolist() == case["rows"]
    assert sha256(rows) == case["all_rows_int64_sha256"]


@pytest.mark.parametrize("case", VECTORS["must_refuse"], ids=lambda case: case["oracle"])
def test_what_megatron_never_answers_is_refused(case: dict) -> None:
    lengths = lengths_of(case["corpus"])
    rules = OrderRules(
        sequence_length=16, num_samples=case["num_samples"], split=case["split"], split_name=case["split_name"]
    )
    with pytest.raises(ConfigError, match=r"the valid part of split '99,1,0' holds none of 24 documents; give it more"):
        MegatronOrder(lengths, rules)


def test_the_hand_made_examples() -> None:
    """The two worked examples: no shuffle hides them, so the documents are asked for in place."""
    from headrace.order.sample_index import build_sample_index

    kept = build_sample_index(np.array([3, 2, 4], np.int32), sequence_length=4, num_samples=2, extra=1)
    assert kept.tolist() == [[0, 0], [1, 1], [2, 3]]
    partial = build_sample_index(np.array([3, 2, 5], np.int32), sequence_length=4, num_samples=3, extra=1)
    assert partial.tolist() == [[0, 0], [1, 1], [2, 3], [2, 4]]
    assert split_range(24, "80,10,10", "valid") == range(19, 22)
