"""Is an argument of the kind that was asked for? A setting read from the environment or a file is often a string."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

from headrace.errors import ConfigError


def whole_number(name: str, value: Any) -> int:
    """`value` as a Python int, NumPy's integers too. ConfigError for anything else: a float, a bool, text, None."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ConfigError(f"{name} must be a whole number, got {value!r} ({type(value).__name__})")


def check_seconds(name: str, value: Any) -> None:
    """ConfigError unless `value` is a positive number of seconds; infinity is one, NaN is none."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise ConfigError(f"{name} must be a positive number of seconds, got {value!r}")
