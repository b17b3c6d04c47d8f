"""Fields of every prediction depth: megatron-core's roll_tensor (tests/vectors/mtp.json), and MindSpeed-LLM's moved
boundaries where they hold together."""

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
    actual_seq_len_from_cu_seqlens,
    cu_seqlens_from_actual_seq_len,
    moved_boundaries,
    moved_left,
    positions_after_moving,
    take_view,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "mtp.json").read_text())
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
WITH_MINDSPEED = [case for case in VECTORS["cases"] if "mindspeed" in case]


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


def batch_of(case):
    batch = {name: np.array(case["depth_0"][name]) for name in FIELDS}
    batch["loss_mask"] = batch["loss_mask"].astype(np.float32)
    if case["packed"]:
        batch["cu_seqlens"] = np.array(case["cu_seqlens"], np.int32)
    return batch


@by_name(VECTORS["cases"])
def test_every_depth_of_every_field(case):
    batch = batch_of(case)
    taken = take_view(batch, View(mtp_depth=case["depths"]))
    for expect in case["expect"]:
        depth = expect["depth"]
        for name in FIELDS:
            moved = moved_left(batch[name], depth, cu_seqlens=batch.get("cu_seqlens"))
            assert moved.tolist() == expect[name], name
            assert moved.dtype == batch[name].dtype
            assert taken[f"mtp_{name}"][depth - 1].tolist() == expect[name], name
            assert taken[f"mtp_{name}"].dtype == batch[name].dtype
            assert taken[name] is batch[name], "depth 0 is handed out as it lies"
        assert taken["mtp_loss_mask"][depth - 1].sum() == expect["num_tokens"]
        if case["packed"]:
            assert taken["cu_seqlens"].tolist() == expect["cu_seqlens"]


@by_name(VECTORS["context_parallel"])
def test_fields_move_first_and_are_cut_afterwards(case):
    batch = batch_of(case | {"packed": True})
    for rank in case["ranks"]:
        cut = "documents" if case["packed"] else "rows"
        taken = take_view(batch, View(cp_size=case["cp"], cp_rank=rank["rank"], cut=cut, mtp_depth=case["depths"]))
        assert taken["tokens"].ravel().tolist() == batch["tokens"].ravel()[rank["index"]].tolist()
        for expect in rank["per_depth"]:
            for name in FIELDS:
                assert taken[f"mtp_{name}"][expect["depth"] - 1].ravel().tolist() == expect[name], name


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(2, 3), st.integers(1, 3), st.data())
def test_moving_and_cutting_padded_documents(lengths, cp_size, depth, data):
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    tokens = np.arange(1, ends[-1] + 1)[None]
    batch = {"tokens": tokens, "loss_mask": np.ones(tokens.shape, np.float32), "cu_seqlens": ends}
    rank = data.draw(st.integers(0, cp_size - 1))
    whole = moved_left(tokens, depth, cu_seqlens=ends)
    moved_then_cut = take_view(batch | {"tokens": whole}, View(cp_size=cp_size, cp_rank=rank))["tokens"]
    taken = take_view(batch, View(cp_size=cp_size, cp_rank=rank, mtp_depth=depth))
    assert np.array_equal(taken["mtp_tokens"][depth - 1], moved_then_cut)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4), st.sampled_from(["rows", "contiguous"]))
def test_cut_rows_move_inside_documents(lengths, depth, cut):
    lengths = [*lengths, 4 - sum(lengths) % 4]  # the row can be cut in four
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    batch = {"tokens": np.arange(1, ends[-1] + 1)[None], "cu_seqlens": ends}
    whole = moved_left(batch["tokens"], depth, cu_seqlens=ends)
    for rank in range(2):
        view = View(cp_size=2, cp_rank=rank, cut=cut, mtp_depth=depth)
        expected = take_view({"tokens": whole}, View(cp_size=2, cp_rank=rank, cut=cut))["tokens"]
        assert np.array_equal(take_view(batch, view)["mtp_tokens"][depth - 1], expected)


def test_a_label_that_no_mask_covers_is_ignored_past_the_end_of_its_document():
    batch = {
        "input": np.array([[1, 2, 3]]),
        "labels": np.array([[2, -100, 4]]),
        "cu_seqlens": np.array([0, 2, 3], "i4"),
    }
    assert take_view(batch, View(mtp_depth=1))["mtp_labels"].tolist() == [[[-100, -100, -100]]]
    hf = {"input_ids": np.array([[1, 2, 3]]), "labels": np.array([[-100, 2, 3]]), "shift_labels": np.array([[2, 3, 4]])}
    taken = take_view(hf, View(mtp_depth=1))
    assert taken["mtp_shift_labels"].tolist() == [[[3, 4, -100]]]
    assert "mtp_labels" not in taken


@by_name(WITH_MINDSPEED)
def test_moved_boundaries_are_mindspeeds_where_those_hold_together(case):
    ends = np.array(case["cu_seqlens"], np.int32)
    broken = {fault.split(":")[0] for fault in case["mindspeed"].get("faults", ())}
    for depth in range(1, case["depths"] + 1):
        moved = moved_boundaries(ends, depth, seq_length=case["seq_length"])
        theirs = case["mindspeed"]["actual_seq_len_per_depth"][depth - 1]
        if f"depth {depth}" not in broken:
            assert actual_seq_len_from_cu_seqlens(moved) == theirs
            positions = np.array(case["depth_0"]["position_ids"]).reshape(case["micro_batch_size"], -1)
            found = positions_after_moving(positions, depth, cu_seqlens=ends)
            assert found.tolist() == case["mindspeed"]["position_ids_per_depth"][depth - 1]
        else:
            with pytest.raises(ConfigError):
                cu_seqlens_from_actual_seq_len(theirs)


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=5), min_size=1, max_size=3), st.integers(0, 6))
def test_moved_boundaries_hold_together_whatever_the_documents(rows, depth):
    seq_length = max(map(sum, rows))
    lengths = [length for row in rows for length in [*row[:-1], seq_length - sum(row[:-1])]]
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    moved = moved_boundaries(ends, depth, seq_length=seq_length)
    assert moved.dtype == np.int32
    assert moved[0] == 0
    assert (np.diff(moved) > 0).all()
    assert set(range(seq_length, len(rows) * seq_length + 1, seq_length)) <= set(moved.tolist()), "row ends stay"
    assert len(moved) <= len(ends)


def test_a_view_with_moved_boundaries():
    batch = batch_of(VECTORS["cases"][0])
    taken = take_view(batch, View(mtp_depth=2, mtp_boundaries="moved"))
    assert taken["mtp_tokens"].tolist() == [[[6, 9, 7, 9, 9, 8, 4, 0]], [[9, 7, 9, 9, 8, 4, 0, 0]]]
    assert taken["mtp_position_ids"].tolist() == [[[0, 1, 0, 1, 0, 0, 1, 0]], [[0, 0, 1, 0, 0, 1, 0, 0]]]
    assert [taken[f"mtp_cu_seqlens_{depth}"].tolist() for depth in (1, 2)] == [[0, 2, 4, 5, 8], [0, 1, 3, 4, 8]]
    with pytest.raises(ConfigError, match="no cu_seqlens"):
        take_view({"tokens": batch["tokens"]}, View(mtp_depth=1, mtp_boundaries="moved"))


def test_several_depths_at_once_never_wrap_round():
    case = VECTORS["roll_by_more_than_one_at_once"]
    tokens = np.array(case["texts"])[:, :-1]
    for depth, expect in enumerate(case["megatron_step_by_step"], 1):
        assert moved_left(tokens, depth).tolist() == expect
    assert moved_left(tokens, 0).tolist() == tokens.tolist()
    assert moved_left(tokens, 99).tolist() == [[0] * 8]
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        moved_left(tokens, -1)
