"""What every form of the report shows: headlines, means per rank and shares, from the analysis document (version 1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any, TypeAlias

from headrace.errors import FormatError
from headrace.wording import counted

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


HEADLINES = {
    "partition": "a pipeline stage is slow, because of its part of the model",
    "data": "another rank is slow from step to step, because of its data",
    "none": "no rank is slow",
    "undecidable": "cannot say whether a rank is slow",
}
"""Of the verdicts that name no rank."""

LINK_HEADLINES = {
    "slow": "a link is slow",
    "small_packets": "a link looks slow, because of its small packets",
    "none": "no link is slow",
    "undecidable": "cannot say whether a link is slow",
}


def check_document(document: Json) -> None:
    """Raise FormatError for anything but an analysis this version can show."""
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise FormatError(
            f"the report shows {FORMAT} version {VERSION}, this is {document.get('format')} {document.get('version')}"
        )


def rank_headline(document: Json) -> str:
    """The verdict on ranks in one short line; `reasons` are what follows it."""
    verdict = document["slow_rank"]
    if verdict["verdict"] in HEADLINES:
        return HEADLINES[verdict["verdict"]]
    rank = verdict["rank"]
    on_cpu = any(entry["rank"] == rank and entry.get("device") == "cpu" for entry in document["inputs"])
    if verdict["verdict"] == "host":
        culprit = "its host"
    elif verdict["traced"] is False:
        culprit = "its card or its host"
    else:  # a CPU job has no cards
        culprit = "its core or its work" if on_cpu else "its card"
    return f"rank {rank} is slow, because of {culprit}"


def link_headline(document: Json) -> str:
    """The same for links."""
    verdict = document["slow_link"]
    num_slow = sum(link["slow"] for link in verdict["links"])
    if verdict["verdict"] == "slow" and num_slow > 1:
        return f"{num_slow} links are slow"
    return LINK_HEADLINES[verdict["verdict"]]


def reasons(verdict: Json, headline: str) -> str:
    """What the verdict says beyond its headline: the numbers, or why it cannot be decided."""
    what: str = verdict["what"]
    return what.removeprefix(f"{headline}: ")


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


def notes_of(document: Json, *, most_ranks: int) -> list[str]:
    """What the analysis has to say beside its figures; a note of many inputs once, with the first ranks it is of."""
    by_note: dict[str, list[str]] = {}
    for entry in document["inputs"]:
        for note in entry["notes"]:
            by_note.setdefault(note, []).append("?" if entry["rank"] is None else str(entry["rank"]))
    notes = [*document["notes"], *(f"rank {', '.join(ranks[:most_ranks])}: {note}" for note, ranks in by_note.items())]
    notes += [
        f"rank {entry['rank']}: {counted(entry['count'], 'collective')} cannot be paired: {entry['why']}"
        for entry in document["collectives"]["cannot_pair"]
    ]
    if document["unmatched_collectives"]:
        unmatched = counted(document["unmatched_collectives"], "collective")
        notes.append(f"{unmatched} without a counterpart on another traced rank")
    return notes


def extent(steps: Sequence[int]) -> str:
    """Of sorted steps: `3 steps, 2 to 4`."""
    if not steps:  # traces without step marks
        return "all that was recorded"
    return f"{len(steps)} steps, {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def wait_steps(document: Json) -> list[int]:
    """The steps that the sums of the wait table are over."""
    return sorted({int(step) for row in document["waits"] for step in row["by_step_us"] if step.isdigit()})


def quantity(value: float, unit: str) -> str:
    """A rule's value with its unit; times in ms, like those around it."""
    return f"{milliseconds(value)} ms" if unit == "us" else f"{value:,.3f} {unit}"


def milliseconds(microseconds: float | None) -> str:
    """For a table: `12.34`, or `-` for what is not known."""
    return "-" if microseconds is None else f"{microseconds / 1000:,.2f}"


def share(part: float | None, whole: float | None) -> str:
    """For a table: `12 %`, or `-`."""
    return "-" if part is None or not whole else f"{part / whole:.0%}".replace("%", " %")
