"""Interval arithmetic against a grid of single nanoseconds: slow, obvious, exact."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.traces.intervals import EMPTY, clip, gaps, intersect, length_ns, merge, subtract, union

SPAN = 60

raw_intervals = st.lists(st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)), max_size=12)


def make(raw):
    return union(np.array([a for a, _ in raw], dtype=np.int64), np.array([b for _, b in raw], dtype=np.int64))


def moments(intervals):
    return {t for start, end in intervals.tolist() for t in range(start, end)}


def assert_is_a_set(intervals):
    assert intervals.dtype == np.int64
    assert (intervals[:, 1] > intervals[:, 0]).all()
    assert (intervals[1:, 0] > intervals[:-1, 1]).all()


@given(raw_intervals)
def test_a_union_covers_each_moment_once_and_is_canonical(raw):
    result = make(raw)
    assert_is_a_set(result)
    assert moments(result) == {t for a, b in raw for t in range(a, b)}
    assert length_ns(result) == len(moments(result))


@given(raw_intervals, raw_intervals)
def test_set_operations_agree_with_the_grid(raw_left, raw_right):
    left, right = make(raw_left), make(raw_right)
    for result, expected in [
        (merge(left, right), moments(left) | moments(right)),
        (intersect(left, right), moments(left) & moments(right)),
        (subtract(left, right), moments(left) - moments(right)),
    ]:
        assert moments(result) == expected
    assert length_ns(left) == length_ns(intersect(left, right)) + length_ns(subtract(left, right))


@given(raw_intervals, st.integers(0, SPAN), st.integers(0, SPAN))
def test_clip_and_gaps_share_the_window(raw, start, end):
    intervals = make(raw)
    window = set(range(start, end))
    assert moments(clip(intervals, start, end)) == moments(intervals) & window
    if start <= end:
        assert moments(gaps(intervals, start, end)) == window - moments(intervals)


def test_overlap_of_a_collective_with_overlapping_kernels_counts_each_moment_once():
    # communication [0, 10), kernels [2, 4) and [3, 8) on two streams: 6 of 10 are hidden, not 7
    communication = make([(0, 10)])
    computing = make([(2, 4), (3, 8)])
    assert length_ns(intersect(communication, computing)) == 6


def test_absolute_epoch_nanoseconds_lose_nothing():
    base = 1_736_408_883_732_241_564
    result = union(np.array([base, base + 1], dtype=np.int64), np.array([base + 1, base + 3], dtype=np.int64))
    assert result.tolist() == [[base, base + 3]]
    assert length_ns(EMPTY) == 0
