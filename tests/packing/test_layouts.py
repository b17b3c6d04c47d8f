"""The specification of a batch in each layout is what `pack` fills."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.packing import LAYOUTS, Packer, PackRules, batch_spec, pack
from headrace.spec import Field

ROWS = np.array([[5, 6, 9, 7, 9, 9, 8, 4, 3], [1, 2, 3, 9, 4, 5, 6, 9, 7]])
RULES = PackRules(eod=9, pad=0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)


def test_megatron_s_specification():
    assert batch_spec("megatron", 2, 8).fields == (
        Field(name="tokens", dtype="int64", shape=(2, 8)),
        Field(name="labels", dtype="int64", shape=(2, 8)),
        Field(name="loss_mask", dtype="float32", shape=(2, 8)),
        Field(name="position_ids", dtype="int64", shape=(2, 8)),
        Field(name="cu_seqlens", dtype="int32", shape=(17,), ragged=True),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_packed_batch_fills_its_specification(layout):
    spec = batch_spec(layout, 2, 8)
    batch = pack(ROWS, RULES, layout=layout)
    for field in spec.fields:
        assert batch[field.name].dtype == field.dtype
        assert batch[field.name].shape == ((7,) if field.ragged else field.shape)
        assert batch[field.name].base is None, "the caller owns the memory"
    names = {field.name for field in spec.fields} | {alias for alias, _ in spec.aliases}
    assert set(batch) == names | {"num_documents", "max_seqlen"}


def test_a_model_that_shifts_by_itself_sees_the_same_targets():
    """It compares logits[i - 1] with labels[i]; so position i - 1 must have the target that `shift_labels` gives it."""
    batch = pack(ROWS, RULES, layout="transformers")
    assert batch["labels"].tolist()[0] == [-100, 6, 9, -100, 9, -100, -100, 4]
    assert batch["shift_labels"].tolist()[0] == [6, 9, -100, 9, -100, -100, 4, 3]
    assert (batch["labels"][:, 0] == -100).all()
    assert np.array_equal(batch["labels"][:, 1:], batch["shift_labels"][:, :-1])


def test_targets_without_a_loss_mask_are_ignored_where_the_loss_mask_is_0():
    megatron, torchtitan = pack(ROWS, RULES), pack(ROWS, RULES, layout="torchtitan")
    masked = np.where(megatron["loss_mask"] == 0, -100, megatron["labels"])
    assert np.array_equal(torchtitan["labels"], masked)
    assert np.array_equal(torchtitan["positions"], megatron["position_ids"])


def test_a_slot_may_show_its_boundaries_under_both_names():
    boundaries = np.zeros(17, np.int32)
    counts = Packer(RULES, layout="transformers").pack_into(
        ROWS, {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    )
    assert boundaries[: counts.num_documents + 1].tolist() == [0, 3, 5, 6, 8, 12, 16]


def test_an_unknown_layout_lists_the_known_ones():
    with pytest.raises(ConfigError, match="one of megatron, transformers, torchtitan, got 'nemo'"):
        batch_spec("nemo", 1, 8)


@pytest.mark.parametrize(("micro_batch_size", "seq_length"), [(0, 8), (1, 0), (-1, 8), (1, -8)])
def test_sizes_below_one(micro_batch_size, seq_length):
    with pytest.raises(ConfigError, match=f"at least 1, got {micro_batch_size} and {seq_length}"):
        batch_spec("megatron", micro_batch_size, seq_length)
