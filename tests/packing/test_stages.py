"""Keys per pipeline stage: Megatron-LM's table, and MindSpeed-LLM's for DualPipeV (tests/vectors/stages.json)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.packing import View, stage_keys, stage_of, stages_of, take_view

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "stages.json").read_text())


def described(case):
    return "-".join(str(value) for key, value in case.items() if key not in ("keys", "uninitialised_on_the_others"))


@pytest.mark.parametrize("case", VECTORS["megatron"], ids=described)
def test_megatrons_keys(case):
    keys = stage_keys(
        "mtp" if case["mtp"] else case["stage"],
        packed=case["packed"],
        attention_mask=case["attention_mask"],
        cp_size=case["cp"],
    )
    assert list(keys) == case["keys"]
    assert bool(keys) == case["reads_a_batch"]


@pytest.mark.parametrize("case", [c for c in VECTORS["mindspeed"] if c["schedule"] == "dualpipev"], ids=described)
def test_dualpipev_keys(case):
    keys = stage_keys(case["stage"], packed=case["packed"], attention_mask=case["attention_mask"], schedule="dualpipev")
    theirs = [key for key in case["keys"] if key != "actual_seq_len"]
    assert [key for key in keys if key not in ("cu_seqlens", "max_seqlen")] == theirs
    # Their one list of boundaries is our two keys.
    assert ("cu_seqlens" in keys) == ("actual_seq_len" in case["keys"]) == ("max_seqlen" in keys)


BATCH = {
    "tokens": np.arange(8)[None],
    "labels": np.arange(8)[None] + 1,
    "loss_mask": np.ones((1, 8), np.float32),
    "position_ids": np.arange(8)[None],
    "attention_mask": np.zeros((1, 1, 8, 8), bool),
    "cu_seqlens": np.array([0, 3, 8], np.int32),
    "max_seqlen": 5,
    "image": np.ones(3),
}


EVERYWHERE = {"cu_seqlens", "max_seqlen", "image"}
FIRST = EVERYWHERE | {"tokens", "position_ids", "attention_mask"}
LAST = EVERYWHERE | {"labels", "loss_mask", "attention_mask"}


@pytest.mark.parametrize(
    ("view", "keys"),
    [
        (View(), set(BATCH)),
        (View(stage="first"), FIRST),
        (View(stage="middle"), EVERYWHERE),
        (View(stage="middle", also=("position_ids",)), EVERYWHERE | {"position_ids"}),
        (View(stage="last"), LAST),
        (View(stage="mtp"), set(BATCH)),
        (View(stage=("first", "middle")), FIRST),
        (View(stage=("middle", "last")), LAST),
        (View(stage=("first", "last")), set(BATCH)),
        (View(stage="first", schedule="dualpipev"), set(BATCH)),
        (View(stage="middle", schedule="dualpipev"), EVERYWHERE | {"position_ids", "attention_mask"}),
    ],
    ids=repr,
)
def test_a_view_hands_out_what_its_stages_need_and_what_no_stage_knows(view, keys):
    taken = take_view(BATCH, view)
    assert set(taken) == keys
    for name in keys:
        assert taken[name] is BATCH[name], "fields are handed out as they lie"


def test_a_middle_stage_under_context_parallelism_knows_both_lists():
    taken = take_view(BATCH | {"attention_mask": np.ones(1)}, View(stage="middle", cp_size=2, cp_rank=1))
    assert set(taken) == {"cu_seqlens", "cu_seqlens_padded", "max_seqlen", "image"}
    assert taken["cu_seqlens_padded"].tolist() == [0, 4, 12]
    assert taken["max_seqlen"] == 8


@pytest.mark.parametrize(
    ("names", "stage", "keys"),
    [
        (("input_ids", "position_ids", "labels", "shift_labels", "cu_seq_lens_q"), "first", [0, 1, 4]),
        (("input_ids", "position_ids", "labels", "shift_labels", "cu_seq_lens_q"), "last", [2, 3, 4]),
        (("input", "positions", "labels", "cu_seqlens"), "first", [0, 1, 3]),
        (("input", "positions", "labels", "cu_seqlens"), "middle", [3]),
    ],
)
def test_other_layouts_names(names, stage, keys):
    batch = {name: np.zeros((1, 4), np.int64) for name in names}
    assert list(take_view(batch, View(stage=stage))) == [names[key] for key in keys]


def test_stages_of_chunks():
    assert stage_of(0, 1) == "only"
    assert [stage_of(rank, 4) for rank in range(4)] == ["first", "middle", "middle", "last"]
    assert stages_of(0, 2, virtual_size=2) == ("first", "middle")
    assert stages_of(1, 2, virtual_size=2) == ("middle", "last")
    assert stages_of(0, 1, virtual_size=3) == ("first", "middle", "last")
    for wrong in ({"pp_rank": 2, "pp_size": 2}, {"pp_rank": 0, "pp_size": 2, "virtual_rank": 1}):
        with pytest.raises(ConfigError, match="must lie in"):
            stage_of(**wrong)
