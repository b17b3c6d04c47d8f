"""Cuts that other programs computed (tests/vectors/context_parallel.json: megatron-core, TransformerEngine), and the C
pass against the index functions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.packing import (
    View,
    document_index,
    local_boundaries,
    pad_boundaries,
    padded_source,
    row_chunks,
    row_index,
    take_view,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "context_parallel.json").read_text())


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=[case.get("name", str(case)) for case in cases])


def batch_of(tokens, ends, **fields):
    tokens = np.asarray(tokens, np.int64)
    positions = np.arange(tokens.size) - np.repeat(ends[:-1], np.diff(ends))
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": np.ones(tokens.shape, np.float32),
        "position_ids": positions.reshape(tokens.shape),
        "cu_seqlens": np.asarray(ends, np.int32),
        "max_seqlen": int(np.diff(ends).max()),
    } | fields


def boundaries(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


@by_name(VECTORS["whole_row"])
def test_whole_rows(case):
    positions = np.array(case["position_ids"])
    rows, length = positions.shape
    cu_seqlens = boundaries([length] * rows)
    for rank in case["ranks"]:
        index = row_index("rows", length, case["cp"], rank["rank"])
        assert index.dtype == np.int64
        assert index.tolist() == rank["index"]
        view = View(cp_size=case["cp"], cp_rank=rank["rank"], cut="rows")
        taken = take_view(batch_of(np.arange(positions.size).reshape(rows, length), cu_seqlens), view)
        assert taken["tokens"].tolist() == [(row * length + index).tolist() for row in range(rows)]
        taken = take_view(batch_of(positions, cu_seqlens, position_ids=positions), view)
        assert taken["position_ids"].tolist() == rank["position_ids"]
        assert taken["cu_seqlens"].tolist() == cu_seqlens.tolist(), "boundaries stay global"


@by_name(VECTORS["per_document"])
def test_documents(case):
    cu_seqlens = boundaries(case["document_lengths"])
    padded = pad_boundaries(cu_seqlens, case["cp"])
    assert padded.dtype == np.int32
    assert padded.tolist() == case["cu_seqlens_padded"]
    assert padded_source(cu_seqlens, padded).tolist() == case["padded_source"]
    assert local_boundaries(padded, case["cp"]).tolist() == case["cu_seqlens_local"]
    shape = (case.get("micro_batch_size", 1), -1)
    batch = batch_of(100 + np.arange(cu_seqlens[-1]).reshape(shape), cu_seqlens)
    for rank in case["ranks"]:
        assert document_index(padded, case["cp"], rank["rank"]).tolist() == rank["index"]
        taken = take_view(batch, View(cp_size=case["cp"], cp_rank=rank["rank"]))
        tokens = [0 if source < 0 else 100 + source for source in rank["source"]]
        assert taken["tokens"].ravel().tolist() == tokens
        assert taken["labels"].ravel().tolist() == [0 if source < 0 else 101 + source for source in rank["source"]]
        assert taken["loss_mask"].ravel().tolist() == [float(source >= 0) for source in rank["source"]]
        assert taken["position_ids"].ravel().tolist() == rank["position_ids"]
        assert taken["max_seqlen"] == case["max_seqlen_padded"]
        assert taken["cu_seqlens"].tolist() == case["cu_seqlens"]
        if case["cp"] > 1:
            assert taken["cu_seqlens_padded"].tolist() == case["cu_seqlens_padded"]
            assert taken["tokens"].shape[0] == 1, "documents of all rows are one stream"


@by_name(VECTORS["must_refuse"]["whole_row"])
def test_rows_that_cannot_be_cut_are_refused(case):
    with pytest.raises(ConfigError, match=f"multiple of 2 \\* cp_size = {2 * case['cp']}, got {case['seq_length']}"):
        row_index("rows", case["seq_length"], case["cp"], 0)
    batch = batch_of(np.arange(case["seq_length"])[None], [0, case["seq_length"]])
    with pytest.raises(ConfigError, match="tokens would be lost"):
        take_view(batch, View(cp_size=case["cp"], cut="rows"))


@by_name(VECTORS["must_refuse"]["per_document"])
def test_documents_that_cannot_be_cut_are_refused_bare_and_padded_in_a_view(case):
    cu_seqlens, cp_size = boundaries(case["document_lengths"]), case["cp"]
    with pytest.raises(ConfigError, match=f"no multiple of 2 \\* cp_size = {2 * cp_size}; pad documents first"):
        document_index(cu_seqlens, cp_size, 0)
    batch = batch_of(1 + np.arange(cu_seqlens[-1])[None], cu_seqlens)
    parts = [take_view(batch, View(cp_size=cp_size, cp_rank=rank))["tokens"].ravel() for rank in range(cp_size)]
    assert sorted(token for part in parts for token in part if token) == batch["tokens"].ravel().tolist()


lengths_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@given(lengths_of_documents, st.integers(2, 5), st.data())
def test_a_view_takes_what_the_index_says(lengths, cp_size, data):
    cu_seqlens = boundaries(lengths)
    rank = data.draw(st.integers(0, cp_size - 1))
    batch = batch_of(np.random.default_rng(len(lengths)).integers(1, 99, (1, cu_seqlens[-1])), cu_seqlens)
    taken = take_view(batch, View(cp_size=cp_size, cp_rank=rank))
    padded = pad_boundaries(cu_seqlens, cp_size)
    source = padded_source(cu_seqlens, padded)[document_index(padded, cp_size, rank)]
    for name, field in batch.items():
        if name in ("tokens", "labels", "loss_mask"):
            expected = np.where(source < 0, 0, field.ravel()[source])
            assert np.array_equal(taken[name].ravel(), expected), name
            assert taken[name].dtype == field.dtype
    within = np.arange(padded[-1]) - np.repeat(padded[:-1], np.diff(padded))
    assert np.array_equal(taken["position_ids"].ravel(), within[document_index(padded, cp_size, rank)])


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from(["rows", "contiguous", "hybrid"]), st.data())
def test_the_parts_of_all_ranks_are_the_batch(rows, half, cut, data):
    ulysses_size = data.draw(st.sampled_from([1, 2, 3])) if cut == "hybrid" else 1
    cp_size = ulysses_size * data.draw(st.integers(1, 3))
    length = 2 * half * cp_size * ulysses_size
    batch = batch_of(np.arange(rows * length).reshape(rows, length), boundaries([length] * rows))
    seen = []
    for rank in range(cp_size):
        view = View(cp_size=cp_size, cp_rank=rank, cut=cut, ulysses_size=ulysses_size)
        taken = take_view(batch, view)["tokens"]
        index = row_index(cut, length, cp_size, rank, ulysses_size=ulysses_size)
        assert np.array_equal(taken, batch["tokens"][:, index])
        seen += taken.ravel().tolist()
    assert sorted(seen) == list(range(rows * length))


def test_hybrid_is_a_zigzag_over_the_ring_then_chunks_within_it():
    parts = [row_index("hybrid", 16, 4, rank, ulysses_size=2).tolist() for rank in range(4)]
    assert parts == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [row_index("hybrid", 16, 4, rank, ulysses_size=1).tolist() for rank in range(4)] == [
        row_index("rows", 16, 4, rank).tolist() for rank in range(4)
    ]
    assert [row_chunks("hybrid", 16, 4, rank, ulysses_size=4) for rank in range(4)] == [
        row_chunks("contiguous", 16, 4, rank) for rank in range(4)
    ]


def test_a_contiguous_part_is_the_same_memory():
    batch = batch_of(np.arange(32).reshape(2, 16), boundaries([16, 16]))
    for rank in range(4):
        taken = take_view(batch, View(cp_size=4, cp_rank=rank, cut="contiguous"))
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert np.shares_memory(taken[name], batch[name])
            assert np.array_equal(taken[name], batch[name][:, 4 * rank : 4 * rank + 4])


def test_documents_that_come_padded_are_not_padded_again():
    batch = batch_of(np.arange(16)[None], boundaries([4, 8, 4]), cu_seqlens=boundaries([3, 5, 4]))
    batch["cu_seqlens_padded"] = boundaries([4, 8, 4])
    taken = take_view(batch, View(cp_size=2, cp_rank=0))
    assert taken["tokens"].tolist() == [[0, 3, 4, 5, 10, 11, 12, 15]]
    assert taken["cu_seqlens"].tolist() == [0, 3, 8, 12]
    assert taken["cu_seqlens_padded"].tolist() == [0, 4, 12, 16]
    batch["cu_seqlens_padded"] = boundaries([6, 6, 4])
    with pytest.raises(ConfigError, match=r"not all to multiples of 4 \(2 \* cp_size\): 16 tokens would become 20"):
        take_view(batch, View(cp_size=2))


def test_fields_shaped_like_the_tokens_are_cut_and_others_pass():
    extra = {"segment_ids": np.arange(16, dtype=np.int16)[None], "image": np.ones((3, 4, 4)), "cost": np.float64(2.5)}
    taken = take_view(batch_of(np.arange(16)[None], boundaries([16]), **extra), View(cp_size=2, cut="rows"))
    assert taken["segment_ids"].tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert taken["image"].shape == (3, 4, 4)
    assert taken["cost"] == 2.5


def test_a_mask_is_cut_along_its_queries():
    mask = np.triu(np.ones((16, 16), bool), 1)[None, None]
    batch = batch_of(np.arange(16)[None], boundaries([16]), attention_mask=mask)
    for cut in ("rows", "contiguous"):
        taken = take_view(batch, View(cp_size=2, cp_rank=1, cut=cut))["attention_mask"]
        assert np.array_equal(taken, mask[:, :, row_index(cut, 16, 2, 1)])
    with pytest.raises(ConfigError, match=r"attention_mask of shape \[1, 1, 16, 16\] cannot be cut by 'documents'"):
        take_view(batch, View(cp_size=2))


def test_labels_of_a_model_that_shifts_by_itself_are_never_wrong_where_a_row_was_cut():
    """It compares logits[j - 1] with labels[j]: where the token before is on another rank there is no target here."""
    tokens = np.arange(16, dtype=np.int64)[None]
    batch = {
        "input_ids": tokens,
        "labels": np.where(tokens == 0, -100, tokens),
        "shift_labels": np.where(tokens == 15, -100, tokens + 1),
        "cu_seq_lens_q": boundaries([5, 11]),
        "cu_seq_lens_k": boundaries([5, 11]),
    }
    for cut in ("rows", "documents"):
        for rank in range(2):
            taken = take_view(batch, View(cp_size=2, cp_rank=rank, cut=cut))
            shift, own = taken["shift_labels"].ravel(), taken["labels"].ravel()
            assert own[0] == -100
            for j in range(1, own.size):
                assert own[j] in (-100, shift[j - 1])
            assert (own != -100).sum() >= own.size // 4
    assert taken["cu_seq_lens_q"].tolist() == [0, 8, 20]
    assert taken["cu_seq_lens_k"] is taken["cu_seq_lens_q"]
    assert (taken["shift_labels"].ravel()[taken["input_ids"].ravel() == 0] == -100).all(), "padding has no target"
    del batch["shift_labels"]
    with pytest.raises(ConfigError, match="let the source give shift_labels"):
        take_view(batch, View(cp_size=2))


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([0, 4, 4, 16], "a document of length 0: entry 2 is 4, the one before it 4"),
        ([0, 8, 4, 16], "boundaries that go backwards: entry 2 is 4, the one before it 8"),
        ([0, 8], "must end with the 16 tokens it divides, got 8"),
        ([0, 8, 24], "must end with the 16 tokens it divides, got 24"),
        ([4, 16], "must start at 0, got 4"),
        ([16], r"\[documents \+ 1\] with a document, got shape \[1\]"),
    ],
)
def test_boundaries_that_are_none(cu_seqlens, message):
    batch = batch_of(np.arange(16)[None], boundaries([16]), cu_seqlens=np.array(cu_seqlens, np.int32))
    with pytest.raises(ConfigError, match=message):
        take_view(batch, View(cp_size=2))


def test_boundaries_of_another_dtype_or_none():
    batch = batch_of(np.arange(16)[None], boundaries([16]), cu_seqlens=np.array([0, 16]))
    with pytest.raises(ConfigError, match="cu_seqlens must be int32, as attention kernels take it, got int64"):
        take_view(batch, View(cp_size=2))
    del batch["cu_seqlens"]
    with pytest.raises(ConfigError, match=r"the batch has no cu_seqlens, only .* or take cut='rows'"):
        take_view(batch, View(cp_size=2))
    del batch["tokens"]
    with pytest.raises(ConfigError, match="needs tokens"):
        take_view(batch, View(cp_size=2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cp_size": 2, "cp_rank": 2}, r"cp_rank must lie in \[0, cp_size\), got 2 of 2"),
        ({"cp_size": 0}, "got 0 of 0"),
        ({"cut": "zigzag"}, "cut must be one of documents, rows, contiguous, hybrid"),
        ({"cp_size": 4, "cut": "hybrid", "ulysses_size": 3}, "ulysses_size must divide cp_size 4, got 3"),
        ({"cp_size": 4, "ulysses_size": 2}, "ulysses_size 2 needs cut='hybrid'"),
        ({"mtp_depth": -1}, "mtp_depth must be at least 0, got -1"),
        ({"mtp_boundaries": "moving"}, "mtp_boundaries one of kept, moved"),
        ({"cp_size": 2, "mtp_depth": 1, "mtp_boundaries": "moved"}, "cp_size must be 1, got 2"),
        ({"stage": "end"}, "stage must be one of only, mtp, first, middle, last"),
        ({"schedule": "gpipe"}, "schedule one of 1f1b, dualpipev"),
    ],
)
def test_views_without_a_meaning(wrong, message):
    with pytest.raises(ConfigError, match=message):
        View(**wrong)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_positions_run_on_through_padding_in_either_width(dtype):
    positions = np.array([[5, 6, 7, 0, 1]], dtype)  # the first document began on an earlier row
    batch = {"tokens": np.arange(1, 6)[None], "position_ids": positions, "cu_seqlens": boundaries([3, 2])}
    parts = [take_view(batch, View(cp_size=4, cp_rank=rank))["position_ids"] for rank in range(4)]
    assert [part.tolist() for part in parts] == [[[5, 12, 0, 7]], [[6, 11, 1, 6]], [[7, 10, 2, 5]], [[8, 9, 3, 4]]]
    assert all(part.dtype == dtype for part in parts)
