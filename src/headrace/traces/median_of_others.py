"""The yardstick of every comparison here: the median of all the others, for each of many, without n^2 work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Key = TypeVar("Key")


def medians_of_others(values: Mapping[Key, float]) -> dict[Key, float]:
    """Key -> median of the values of all other keys; {} for fewer than two. Sorting once, n log n."""
    if len(values) < 2:
        return {}
    ordered = sorted(values, key=lambda key: values[key])
    place = {key: index for index, key in enumerate(ordered)}

    def without(removed: int, index: int) -> float:
        """The value at `index` once the one at `removed` is gone."""
        return values[ordered[index if index < removed else index + 1]]

    left = len(ordered) - 1
    middle = {(left - 1) // 2, left // 2}
    return {key: sum(without(place[key], index) for index in middle) / len(middle) for key in values}
