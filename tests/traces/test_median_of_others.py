"""The median of all the others, against the obvious way."""

from __future__ import annotations

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from headrace.traces.median_of_others import medians_of_others


@given(st.lists(st.integers(-50, 50), max_size=12))
def test_it_is_the_median_without_oneself(values):
    named = dict(enumerate(values))
    expected = (
        {key: median([v for other, v in named.items() if other != key]) for key in named} if len(named) > 1 else {}
    )
    assert medians_of_others(named) == expected
