"""Figures that every form of the report shows: means per rank and shares, from the analysis document (version 1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import mean
from typing import Any, TypeAlias

from headrace.errors import FormatError

Json: TypeAlias = dict[str, Any]

FORMAT, VERSION = "headrace-analysis", 1

FREE_PARTS = {
    "data_us": "waiting for data",
    "host_launch_us": "host not launching",
    "kernel_wait_us": "launched, not started",
    "exposed_copies_us": "copies",
    "unknown_us": "unknown",
}
"""Free time by cause, in the order it is shown."""

WATERFALL_PARTS = {
    "matrix_us": "matrix units",
    "vector_us": "other kernels",
    "copies_us": "copies",
    "exposed_communication_us": "exposed communication",
    "bubble_us": "bubble",
    "free_us": "idle",
}


def check_document(document: Json) -> None:
    """Raise FormatError for anything but an analysis this version can show."""
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise FormatError(
            f"the report shows {FORMAT} version {VERSION}, this is {document.get('format')} {document.get('version')}"
        )


def mean_per_rank(rows: Iterable[Json], keys: Iterable[str]) -> dict[Any, Json]:
    """Rank -> mean of each key over its rows; None where a row does not know it."""
    by_rank: defaultdict[Any, list[Json]] = defaultdict(list)
    for row in rows:
        by_rank[row["rank"]].append(row)
    wanted = list(keys)
    return {
        rank: {key: mean_or_none(own.get(key) for own in rows_of_rank) for key in wanted}
        for rank, rows_of_rank in by_rank.items()
    }


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """The mean; None as soon as one value is unknown, or without any."""
    known = list(values)
    if not known or any(value is None for value in known):
        return None
    return mean(value for value in known if value is not None)


def flat_breakdown(document: Json) -> list[Json]:
    """Breakdown rows with the parts of free time beside the other keys."""
    return [row | row["free"] for row in document["breakdown"]]


def milliseconds(microseconds: float | None) -> str:
    """For a table: `12.34`, or `-` for what is not known."""
    return "-" if microseconds is None else f"{microseconds / 1000:,.2f}"


def share(part: float | None, whole: float | None) -> str:
    """For a table: `12 %`, or `-`."""
    return "-" if part is None or not whole else f"{part / whole:.0%}".replace("%", " %")
