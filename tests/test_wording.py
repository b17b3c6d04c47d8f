"""One thing is not called by its plural."""

from __future__ import annotations

import pytest

from headrace.wording import counted


@pytest.mark.parametrize(
    ("number", "thing", "said"),
    [
        (0, "step", "0 steps"),
        (1, "step", "1 step"),
        (2, "step", "2 steps"),
        (1, "batch", "1 batch"),
        (1234, "batch", "1,234 batches"),
        (2, "bad record", "2 bad records"),
    ],
)
def test_a_number_and_its_thing(number: int, thing: str, said: str) -> None:
    assert counted(number, thing) == said
