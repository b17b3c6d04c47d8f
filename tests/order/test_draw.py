"""A drawn sequence is known from a wrong one, wherever it is wrong."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.order.draw import Drawing

sizes = st.lists(st.integers(1, 30), min_size=2, max_size=6)


@given(sizes, st.booleans(), st.data())
def test_one_wrong_choice_is_noticed(weights: list[int], exhaustive: bool, data: st.DataObject) -> None:
    shares = [weight / sum(weights) for weight in weights]
    drawing = Drawing(weights=weights, size=None) if exhaustive else Drawing(weights=shares, size=sum(weights))
    choices = drawing.choices()
    assert drawing.gives(choices)
    assert not drawing.gives(choices[:-1])
    assert not drawing.gives(choices.astype(np.int32))
    at = data.draw(st.integers(0, len(choices) - 1))
    choices[at] = (choices[at] + data.draw(st.integers(1, len(weights) - 1))) % len(weights)
    assert not drawing.gives(choices)


def test_an_error_behind_the_first_block_is_noticed() -> None:
    drawing = Drawing(weights=[0.7, 0.3], size=10_000)
    choices = drawing.choices()
    assert drawing.gives(choices)
    choices[9_000] ^= 1
    assert not drawing.gives(choices)


def test_the_worked_example() -> None:
    assert Drawing(weights=[0.6, 0.4], size=5).choices().tolist() == [0, 1, 0, 1, 0]
