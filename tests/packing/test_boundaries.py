"""cu_seqlens and actual_seq_len are two spellings of one list; document lengths are checked before they cut."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.packing import actual_seq_len_from_cu_seqlens, cu_seqlens_from_actual_seq_len
from headrace.packing.boundaries import document_ends


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=50))
def test_the_two_spellings_convert_into_each_other(lengths):
    actual = list(accumulate(lengths))
    cu_seqlens = cu_seqlens_from_actual_seq_len(actual)
    assert cu_seqlens.dtype == np.int32
    assert cu_seqlens.tolist() == [0, *actual]
    back = actual_seq_len_from_cu_seqlens(cu_seqlens)
    assert back == actual
    assert all(type(end) is int for end in back)


@pytest.mark.parametrize("cu_seqlens", [[], [0], [1, 3], [0, 3, 3], [0, 4, 2], [[0, 3]], [0.0, 2.5], [0, -1]])
def test_cu_seqlens_that_are_none(cu_seqlens):
    with pytest.raises(ConfigError, match="cu_seqlens must be a rising list"):
        actual_seq_len_from_cu_seqlens(cu_seqlens)


@pytest.mark.parametrize("actual", [[], [0, 3], [3, 3], [4, 2], [-1]])
def test_actual_seq_len_that_are_none(actual):
    with pytest.raises(ConfigError, match="actual_seq_len must be a rising list"):
        cu_seqlens_from_actual_seq_len(actual)


@pytest.mark.parametrize(
    ("lengths", "add_extra_token", "ends", "accounted"),
    [
        ([[9]], True, [8], [9]),
        ([[8]], False, [8], [8]),
        ([[3, 2, 1, 3]], True, [3, 5, 6, 8], [9]),
        ([[3, 2, 3, 1]], True, [3, 5, 8], [9]),
        ([[3, 2, 3]], False, [3, 5, 8], [8]),
        ([[0, 3, 0, 6, 0]], True, [3, 8], [9]),
        ([[3, 2]], True, [3, 8], [5]),
        ([[3, 1]], True, [8], [4]),
        ([[1]], True, [8], [1]),
        ([[9], [4, 5]], True, [8, 12, 16], [9, 9]),
        ([np.array([4, 5])], True, [4, 8], [9]),
    ],
)
def test_ends_of_given_lengths(lengths, add_extra_token, ends, accounted):
    found = document_ends(lengths, num_rows=len(lengths), seq_length=8, add_extra_token=add_extra_token)
    assert found[0].tolist() == ends
    assert found[0].dtype == np.int32
    assert found[1] == accounted


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "one list per row: 1 rows, got 0 lists"),
        ([[9], [9]], "one list per row: 1 rows, got 2 lists"),
        ([[]], "row 0 must be >= 0 and sum to between 1 and the 9 tokens of the row"),
        ([[0]], "with sum 0"),
        ([[4, 6]], r"got \[4, 6\] with sum 10"),
        ([[12, -3]], r"got \[12, -3\] with sum 9"),
        ([[4.5, 4.5]], "must be integers"),
        ([[None]], "must be integers"),
    ],
)
def test_lengths_that_cannot_be(lengths, message):
    with pytest.raises(ConfigError, match=message):
        document_ends(lengths, num_rows=1, seq_length=8, add_extra_token=True)
