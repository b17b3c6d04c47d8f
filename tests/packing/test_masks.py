"""A dense mask says what the boundaries say, and is refused where it would fill memory; flattened rows are the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.packing import Packer, PackRules, batch_spec, dense_mask, pack

RULES = PackRules(eod=9, reset_position_ids=True, reset_attention_mask=True)
ROWS = np.array([[5, 6, 9, 7, 9, 9, 8, 4, 3], [1, 2, 3, 9, 4, 5, 6, 9, 7]], np.int32)


def test_who_sees_whom():
    batch = pack(ROWS, RULES, attention_mask="dense")
    mask = batch["attention_mask"]
    assert mask.dtype == np.bool_
    assert mask.shape == (2, 1, 8, 8)
    visible = [np.flatnonzero(~query).tolist() for query in mask[0, 0]]
    assert visible == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [5], [6], [6, 7]]
    assert np.array_equal(mask, dense_mask(batch["cu_seqlens"], 2, 8))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 2))
def test_a_key_is_visible_if_it_is_earlier_in_the_same_document(lengths, rows):
    ends = np.cumsum([0, *lengths * rows]).astype(np.int32)
    seq_length = sum(lengths)
    document = np.repeat(np.arange(len(lengths)), lengths)
    i, j = np.arange(seq_length)[:, None], np.arange(seq_length)
    expected = (document[i] != document[j]) | (j > i)
    mask = dense_mask(ends, rows, seq_length)
    for row in range(rows):
        assert np.array_equal(mask[row, 0], expected)


def test_flattened_rows_are_one_row_of_the_same_tokens():
    batch, flat = pack(ROWS, RULES), pack(ROWS, RULES, flatten=True, attention_mask="dense")
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert flat[name].shape == (1, 16)
        assert np.array_equal(flat[name].ravel(), batch[name].ravel())
    assert np.array_equal(flat["cu_seqlens"], batch["cu_seqlens"])
    assert flat["attention_mask"].shape == (1, 1, 16, 16)
    assert np.array_equal(flat["attention_mask"], dense_mask(batch["cu_seqlens"], 1, 16))


@pytest.mark.parametrize(("rows", "seq_length", "flatten"), [(1, 32768, False), (3, 12000, False), (2, 16384, True)])
def test_a_mask_too_large_is_refused_with_its_size(rows, seq_length, flatten):
    nbytes = (rows * seq_length) ** 2 if flatten else rows * seq_length**2
    with pytest.raises(ConfigError, match=f"needs {nbytes:,} bytes in every slot, the limit is 268,435,456"):
        batch_spec("megatron", rows, seq_length, flatten=flatten, attention_mask="dense")


def test_masks_that_are_none():
    with pytest.raises(ConfigError, match=r"'dense' in layout 'megatron' .* got 'dense' in layout 'transformers'"):
        pack(ROWS, RULES, layout="transformers", attention_mask="dense")
    with pytest.raises(ConfigError, match="got 'causal' in layout 'megatron'"):
        pack(ROWS, RULES, attention_mask="causal")
    with pytest.raises(ConfigError, match=r"made from cu_seqlens, the outputs are \['attention_mask'\]"):
        Packer(RULES).pack_into(ROWS, {"attention_mask": np.empty((2, 1, 8, 8), np.bool_)})
