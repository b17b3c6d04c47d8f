"""A figure that was to be reached, and what was found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """`value` None: this run does not cover it, or what it is compared with is missing."""

    what: str
    target: float
    reached_by: Literal["at least", "at most"]
    value: float | None

    @property
    def reached(self) -> bool | None:
        """None as long as there is no value."""
        if self.value is None:
            return None
        return self.value >= self.target if self.reached_by == "at least" else self.value <= self.target


def as_records(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    """For a JSON document."""
    return [asdict(figure) | {"reached": figure.reached} for figure in figures]
