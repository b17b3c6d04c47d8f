"""The tables of settings on the pages name every one, in order, with its default."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from headrace import PackedTokens
from headrace.feed import FeedConfig

DOCS = Path(__file__).parents[2] / "docs"


def table(page: str, *, after: str, before: str) -> list[tuple[str, str]]:
    """(name, default as it is written) of each row between two lines of a page."""
    part = (DOCS / page).read_text().split(f"\n{after}\n")[1].split(f"\n{before}\n")[0]
    return re.findall(r"^\| `(\w+)` \| (.*?) \|", part, re.MULTILINE)


def fields_of(cls: Any) -> list[tuple[str, Any]]:
    return [(field.name, field.default) for field in dataclasses.fields(cls)]


def parameters_of(function: Any) -> list[tuple[str, Any]]:
    """Those with a default: neither `self` nor what is handed on."""
    named = inspect.signature(function).parameters.values()
    return [(one.name, one.default) for one in named if one.default is not inspect.Parameter.empty]


def assert_same(written: list[tuple[str, str]], settings: list[tuple[str, Any]]) -> None:
    assert [name for name, _ in written] == [name for name, _ in settings]
    for (name, cell), (_, default) in zip(written, settings, strict=True):
        if default is dataclasses.MISSING:
            assert cell == "required", name
            continue
        value = eval(cell.strip("`"), {"print": print})
        assert (type(value), value) == (type(default), default), name


def test_the_arguments_of_packed_tokens() -> None:
    written = table("data.md", after="## PackedTokens", before="## Fields")
    assert_same(written, fields_of(PackedTokens))


def test_the_settings_of_a_feed() -> None:
    pytest.importorskip("torch")
    from headrace.torch import Feed

    written = table("feed.md", after="## Settings", before="## The group")
    assert_same(written, parameters_of(Feed.__init__) + fields_of(FeedConfig))


def test_the_keywords_that_begin_a_measurement() -> None:
    pytest.importorskip("torch")
    from headrace.torch.measure.start import Description, start

    written = table(
        "measure.md",
        after="What `start(model, optimizers, ...)` can be told:",
        before="Rules that hold everywhere:",
    )
    keywords = [one for one in parameters_of(start) if one[0] not in ("model", "optimizers")]
    assert_same(written[: len(keywords)], keywords)
    # What is found out where it is not said has no default that code could hold.
    assert [name for name, _ in written[len(keywords) :]] == list(Description.__annotations__)
