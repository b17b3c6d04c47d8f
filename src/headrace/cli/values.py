"""What a value on the command line must be, whatever the verb: said in one sentence before any work begins."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from headrace.errors import ConfigError

Number = TypeVar("Number", int, float)

MOST = 10**9
"""Of anything that is counted here (rounds, tokens per row, documents): a number beyond it is a slip of the finger, and
would end in an overflow or without memory after minutes of work."""

LONGEST_ROW = 2**24
"""Tokens: half a gigabyte of fields."""

_LARGEST = 2**63 - 1
_SHOWN = 40
"""Characters of a value that is too long to be shown."""
_NUMBERS = re.compile(r"[\d.,;:+-]+")
"""Lists of ranks and lengths may be longer than a file name."""


def refuse_arguments(arguments: Sequence[str]) -> None:
    """ConfigError for words that no verb can use: empty ones (a shell variable that was not set), names with nul bytes,
    names longer than the file system allows, numbers that no machine word holds."""
    option = "an argument"
    for argument in arguments:
        value = argument
        if argument.startswith("--") and len(argument) > 2:
            option, has_value, value = argument.partition("=")
            if not has_value:
                continue
        if not value:
            raise ConfigError(f"{option} is empty: was a shell variable not set?")
        if "\0" in value:
            raise ConfigError(f"{option} holds a nul byte: {value[:_SHOWN]!r}; no name can")
        if not _NUMBERS.fullmatch(value):
            _refuse_long_name(option, value)
        elif option != "an argument":
            _refuse_huge_number(option, value)
        option = "an argument"


def _refuse_long_name(option: str, value: str) -> None:
    try:
        os.lstat(value)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            longest = max(len(os.fsencode(part)) for part in value.split("/"))
            raise ConfigError(
                f"{option} is too long for a file name ({longest} bytes between slashes, {len(os.fsencode(value))} in "
                f"all): {value[:_SHOWN]}...; shorten it"
            ) from None


def _refuse_huge_number(option: str, value: str) -> None:
    longest = max(re.findall(r"\d+", value), key=len, default="")
    if len(longest) > 18 and int(longest[:_SHOWN]) > _LARGEST:
        raise ConfigError(
            f"{option} names a number of {len(longest)} digits: {value[:_SHOWN]}; the largest is {_LARGEST:,}"
        )


def whole(number: int, option: str, *, least: int = 1, most: int = MOST) -> int:
    """The number. ConfigError unless it lies between the limits."""
    if not least <= number <= most:
        raise ConfigError(f"{option} must lie between {least:,} and {most:,}, got {number}")
    return number


def finite(number: Number, option: str) -> Number:
    """The number. ConfigError for nan and infinity, which pass every comparison with a limit."""
    if isinstance(number, float) and not math.isfinite(number):
        raise ConfigError(f"{option} takes finite numbers, got {number}")
    return number


def positive(number: float, option: str) -> float:
    """The number. ConfigError for anything else than a finite one above zero."""
    if finite(number, option) <= 0:
        raise ConfigError(f"{option} must be above 0, got {number:g}")
    return number


def numbers(
    text: str, kind: Callable[[str], Number], option: str, *, least: float = -math.inf, most: float = math.inf
) -> tuple[Number, ...]:
    """Comma-separated numbers, each of them finite and between the limits."""
    try:
        found = tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} takes numbers separated by commas, got {text!r}") from None
    for number in found:
        if not least <= finite(number, option) <= most:
            raise ConfigError(f"{option} takes numbers between {least:,} and {most:,}, got {number}")
    return found
