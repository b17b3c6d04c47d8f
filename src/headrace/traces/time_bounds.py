"""What a time in a trace may be. A broken file holds anything: `inf`, 1e300, minus a year.

Such a value must not reach the sums: int64 wraps around, and a wait of a billion years looks like a finding.
"""

from __future__ import annotations

from decimal import Decimal

EARLIEST_NS = -(1 << 53)
"""Stamps count from the epoch, or from a base near the start: nothing lies long before it."""

LATEST_NS = 1 << 62
"""The year 2116. The distance of any two moments in here fits into int64."""

LONGEST_NS = 1 << 53
"""104 days; up to here a float counts whole nanoseconds."""


def stamp_ns(nanoseconds: float | Decimal) -> int:
    """A moment, rounded. Raises ValueError (ArithmeticError for a Decimal that is no number) outside the bounds."""
    if not EARLIEST_NS <= nanoseconds <= LATEST_NS:
        raise ValueError(f"{nanoseconds} ns is no moment of a trace")
    return round(nanoseconds)


def span_ns(nanoseconds: float | Decimal) -> int:
    """A length of time, rounded; tables round a difference to a little less than nothing. Raises as `stamp_ns` does."""
    if not -LONGEST_NS <= nanoseconds <= LONGEST_NS:
        raise ValueError(f"{nanoseconds} ns is no length of time in a trace")
    return round(nanoseconds)


def elapsed_ns(nanoseconds: float | Decimal) -> int:
    """A length of time that was measured: never negative. Raises as `stamp_ns` does."""
    if nanoseconds < 0:
        raise ValueError(f"{nanoseconds} ns is no duration")
    return span_ns(nanoseconds)
