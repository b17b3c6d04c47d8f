"""Values that other programs computed: megatron-core 0.16.1 and Megatron-LM d98e8a64 (tests/vectors/fields.json)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.packing import PackRules, actual_seq_len_from_cu_seqlens, cu_seqlens_from_actual_seq_len, pack

from .model import pack_slowly

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "fields.json").read_text())


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


def rules_of(case) -> PackRules:
    return PackRules(
        eod=case["eod"],
        pad=case["pad"],
        allow_ambiguous_pad_tokens=case.get("allow_ambiguous_pad_tokens", False),
        **case["flags"],
    )


def rows_of_parts(case):
    row_length = case["seq_length"] + case["add_extra_token"]
    texts = [[token for part in parts for token in part] for parts in case["parts"]]
    return np.array([text + [case["pad"]] * (row_length - len(text)) for text in texts])


def assert_fields(batch, expect) -> None:
    for key in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens"):
        assert batch[key].dtype == VECTORS["dtypes"][key]
        assert batch[key].tolist() == expect[key], key
    assert actual_seq_len_from_cu_seqlens(batch["cu_seqlens"]) == expect["actual_seq_len"]
    assert cu_seqlens_from_actual_seq_len(expect["actual_seq_len"]).tolist() == expect["cu_seqlens"]
    assert batch["max_seqlen"] == expect["max_seqlen"]
    assert type(batch["max_seqlen"]) is int
    assert batch["num_documents"] == len(expect["actual_seq_len"])


def representable(case, dtype) -> bool:
    return all(np.iinfo(dtype).min <= token <= np.iinfo(dtype).max for text in case["texts"] for token in text)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case['name']}-{dtype}")
        for case in VECTORS["cases"]
        for dtype in ("uint16", "int32", "int64")
        if representable(case, dtype)
    ],
)
def test_texts_become_the_published_fields(case, dtype):
    rows = np.array(case["texts"], dtype)
    assert_fields(pack(rows, rules_of(case), padding_rows=case["padding_rows"]), case["expect"])


@by_name(VECTORS["cases"])
def test_the_pad_that_counts(case):
    assert rules_of(case).effective_pad == case["effective_pad"]


@by_name(VECTORS["cases"])
def test_boundaries_by_each_rule(case):
    flags = case["flags"] | {"reset_attention_mask": True}
    by_eod = pack(np.array(case["texts"]), rules_of(case | {"flags": flags}))
    assert by_eod["cu_seqlens"].tolist() == case["cu_seqlens_by_rule"]["eod"]
    flags |= {"reset_attention_mask": False}
    by_rows = pack(np.array(case["texts"]), rules_of(case | {"flags": flags}))
    assert by_rows["cu_seqlens"].tolist() == case["cu_seqlens_by_rule"]["rows"]


@by_name(VECTORS["document_parts"])
def test_given_parts_become_the_published_boundaries(case):
    rules = PackRules(eod=case["eod"], pad=case["pad"], add_extra_token=case["add_extra_token"])
    lengths = [[len(part) for part in parts] for parts in case["parts"]]
    assert_fields(pack(rows_of_parts(case), rules, document_lengths=lengths), case["expect"])


@by_name(VECTORS["served_in_order"])
def test_a_row_inherits_nothing_from_the_row_before(case):
    rules = rules_of(case)
    masks = [pack(np.array([text]), rules)["loss_mask"].tolist()[0] for text in case["texts"]]
    assert masks == case["expect"]["loss_mask"]
    joined = pack(np.array(case["texts"]), rules)["loss_mask"].tolist()
    assert joined == case["expect"]["loss_mask"]


@by_name(VECTORS["cases"])
def test_the_model_of_these_tests_agrees_with_the_vectors(case):
    expected = pack_slowly(case["texts"], rules_of(case), padding_rows=case["padding_rows"])
    for key in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen"):
        assert getattr(expected, key) == case["expect"][key], key


@by_name(VECTORS["document_parts"])
def test_the_model_of_these_tests_agrees_about_parts(case):
    rules = PackRules(eod=case["eod"], pad=case["pad"], add_extra_token=case["add_extra_token"])
    lengths = [[len(part) for part in parts] for parts in case["parts"]]
    expected = pack_slowly(rows_of_parts(case), rules, document_lengths=lengths)
    for key in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen"):
        assert getattr(expected, key) == case["expect"][key], key
