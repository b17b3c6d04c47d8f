"""Boundaries as other programs write them: every convention is read, every list that is none is named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.packing import check_boundaries, read_boundaries


def int32(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    "written",
    [
        int32(0, 3, 5, 6, 8),
        int32(0, 3, 5, 6, 8, 8, 8, 8, 8),
        int32(3, 5, 6, 8),
        int32(3, 5, 6, 8, -1, -1, -1, -1),
        int32(0, 3, 5, 6, 8, -1),
        int32(0, 3, 5, 6, 8, 8, 8),
        [3, 5, 6, 8],
        [0, 3, 5, 6, 8],
    ],
    ids=[
        "exact",
        "megatron",
        "actual_seq_len",
        "mindspeed_sft",
        "bridge_argmin",
        "bridge_static",
        "list",
        "list_from_0",
    ],
)
def test_every_convention_gives_the_same_list(written):
    read = read_boundaries(written, seq_length=8)
    assert read.dtype == np.int32
    assert read.tolist() == [0, 3, 5, 6, 8]


def test_rows_are_joined():
    """Megatron's merge over the micro batch; using the first row alone was its fault (PR 5454)."""
    rows = int32(0, 3, 5, 6, 8, 8, 8, 8, 8), int32(0, 4, 8, 8, 8, 8, 8, 8, 8)
    assert read_boundaries(np.stack(rows), seq_length=8).tolist() == [0, 3, 5, 6, 8, 12, 16]
    assert read_boundaries([[3, 5, 6, 8], [4, 8]], seq_length=8).tolist() == [0, 3, 5, 6, 8, 12, 16]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
    st.integers(0, 9),
    st.sampled_from(["exact", "last", "minus"]),
)
def test_whatever_the_documents(lengths, filled, convention):
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    fill = {"exact": [], "last": [ends[-1]] * filled, "minus": [-1] * filled}[convention]
    for first in (0, 1):
        written = np.concatenate([ends[first:], fill]).astype(np.int32)
        assert np.array_equal(read_boundaries(written, seq_length=int(ends[-1])), ends)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (int32(0, 3, 3, 8), "cu_seqlens has a document of length 0: entry 2 is 3, the one before it 3"),
        (int32(0, 5, 3, 8), "boundaries that go backwards: entry 2 is 3, the one before it 5"),
        (int32(0, 3, 6), "must end with the 8 tokens it divides, got 6"),
        (int32(0, 3, 9, 9), "must end with the 8 tokens it divides, got 9"),
        (int32(0, 3, -1, 8), "has a boundary after a filling of -1 at 2"),
        (int32(0), "must end with the 8 tokens"),
        (int32(-1, -1), "must end with the 8 tokens"),
        (int32(), "lists of integers with a document each"),
        (np.array([0, 8]), "must be int32, as attention kernels take it, got int64"),
        (np.array([0.0, 8.0], np.float32), "must be int32, as attention kernels take it, got float32"),
        (np.zeros((1, 1, 2), np.int32), "lists of integers"),
        ([0.5, 8.0], "lists of integers"),
        ([], "must be a list of boundaries"),
        (np.int32([[0, 8], [0, 7]]), "cu_seqlens of row 1 must end with the 8 tokens it divides, got 7"),
    ],
)
def test_lists_that_are_none(written, message):
    with pytest.raises(ConfigError, match=message):
        read_boundaries(written, seq_length=8)


def test_the_check_of_an_exact_list():
    check_boundaries(int32(0, 3, 8), 8)
    for wrong, message in (
        (int32(1, 8), "start at 0"),
        (int32(0, 3, 3, 8), "length 0"),
        (int32(0, 7), "end with the 8"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_boundaries(wrong, 8)
