"""Can this number be? A measured value that cannot is no measurement (None and why); an argument is refused."""

from __future__ import annotations

import math
from typing import Any

from headrace.arguments import whole_number
from headrace.errors import ConfigError


def above_zero(value: float) -> bool:
    """Finite and above zero. A clock that stood still, NaN and infinity are not."""
    return math.isfinite(value) and value > 0.0


def zero_or_more(value: float) -> bool:
    """Finite and not negative."""
    return math.isfinite(value) and value >= 0.0


def whole_at_least(least: int, **numbers: Any) -> None:
    """ConfigError unless every named number is a whole one of `least` or more."""
    for name, value in numbers.items():
        if whole_number(name, value) < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
