"""Exact arithmetic on sets of time intervals.

A set is an int64 array of shape [n, 2]: rows (start_ns, end_ns) that are sorted, disjoint and not empty, so that two
sets hold the same moments exactly when their arrays are equal. Intervals are half open: [0, 10) and [10, 20) touch and
become [0, 20). Everything is an integer number of nanoseconds; nothing is rounded, so lanes add up to the step.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Nanoseconds: TypeAlias = npt.NDArray[np.int64]
"""int64, any shape, nanoseconds."""

IntervalSet: TypeAlias = npt.NDArray[np.int64]
"""int64 [n, 2], sorted, disjoint, no empty row."""

EMPTY: IntervalSet = np.empty((0, 2), dtype=np.int64)
_FIRST = np.zeros(1, dtype=np.int64)


def union(start_ns: Nanoseconds, end_ns: Nanoseconds) -> IntervalSet:
    """The moments covered by at least one interval. Inputs int64 [n], any order; empty and negative ones vanish."""
    if len(start_ns) == 0:
        return EMPTY
    order = in_order(start_ns)
    start, end = start_ns[order], end_ns[order]
    real = end > start
    if not real.all():
        start, end = start[real], end[real]
        if len(start) == 0:
            return EMPTY
    reach = np.maximum.accumulate(end)  # the latest end seen so far: a new run starts only beyond it
    first = np.concatenate([_FIRST, (start[1:] > reach[:-1]).nonzero()[0] + 1])
    result = np.empty((len(first), 2), dtype=np.int64)
    result[:, 0] = start[first]
    result[:-1, 1] = reach[first[1:] - 1]
    result[-1, 1] = reach[-1]
    return result


def in_order(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.intp] | slice:
    """An index that sorts `keys`, stable. What a profiler writes mostly is sorted: looking is cheaper than sorting."""
    if (keys[1:] < keys[:-1]).any():
        return np.argsort(keys, kind="stable")
    return slice(None)


def merge(*sets: IntervalSet) -> IntervalSet:
    """The moments that lie in any of the sets."""
    filled = [intervals for intervals in sets if len(intervals)]
    if len(filled) < 2:
        return filled[0] if filled else EMPTY
    rows = np.concatenate(filled)
    return union(rows[:, 0], rows[:, 1])


def length_ns(intervals: IntervalSet) -> int:
    """Nanoseconds covered."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def intersect(left: IntervalSet, right: IntervalSet) -> IntervalSet:
    """The moments that lie in both sets."""
    if len(left) == 0 or len(right) == 0:
        return EMPTY
    # Rows of `right` that touch row i of `left` are first[i] .. last[i] - 1, because both sets are sorted and disjoint.
    first = right[:, 1].searchsorted(left[:, 0], side="right")
    last = right[:, 0].searchsorted(left[:, 1], side="left")
    pairs = np.maximum(last - first, 0)
    left_row = np.repeat(np.arange(len(left)), pairs)
    ahead = np.cumsum(pairs) - pairs
    right_row = np.arange(int(pairs.sum())) - np.repeat(ahead - first, pairs)
    result = np.empty((len(left_row), 2), dtype=np.int64)
    np.maximum(left[left_row, 0], right[right_row, 0], out=result[:, 0])
    np.minimum(left[left_row, 1], right[right_row, 1], out=result[:, 1])
    return result


def subtract(left: IntervalSet, right: IntervalSet) -> IntervalSet:
    """The moments of `left` that do not lie in `right`."""
    if len(left) == 0 or len(right) == 0:
        return left
    low, high = int(left[0, 0]), int(left[-1, 1])
    return intersect(left, gaps(right, low, high))


def gaps(intervals: IntervalSet, start_ns: int, end_ns: int) -> IntervalSet:
    """The moments of [start_ns, end_ns) that do not lie in the set."""
    inside = clip(intervals, start_ns, end_ns)
    edges = np.empty((len(inside) + 1, 2), dtype=np.int64)
    edges[0, 0], edges[-1, 1] = start_ns, end_ns
    edges[1:, 0], edges[:-1, 1] = inside[:, 1], inside[:, 0]
    return edges[edges[:, 1] > edges[:, 0]]


def clip(intervals: IntervalSet, start_ns: int, end_ns: int) -> IntervalSet:
    """The moments of the set inside [start_ns, end_ns)."""
    if end_ns <= start_ns:
        return EMPTY
    first = int(intervals[:, 1].searchsorted(start_ns, side="right"))
    last = int(intervals[:, 0].searchsorted(end_ns, side="left"))
    if last <= first:
        return EMPTY
    inside = intervals[first:last].copy()
    inside[0, 0] = max(int(inside[0, 0]), start_ns)
    inside[-1, 1] = min(int(inside[-1, 1]), end_ns)
    return inside
