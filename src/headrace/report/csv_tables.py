"""The report as CSV, with the headings of Ascend's own tools, so that sheets made for those read these too."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from headrace.errors import ConfigError
from headrace.report.summary import Json, check_document

STEP_TRACE = (
    "Step",
    "Type",
    "Index",
    "Computing",
    "Communication(Not Overlapped)",
    "Overlapped",
    "Communication",
    "Free",
    "Stage",
    "Bubble",
    "Communication(Not Overlapped and Exclude Receive)",
    "Preparing",
)
"""cluster_step_trace_time.csv of msprof-analyze; microseconds."""

MATRIX = ("Src Rank", "Dst Rank", "Transport Type", "Transit Size(MB)", "Transit Time(ms)", "Bandwidth(GB/s)")
COMMUNICATION = (
    "Step",
    "Op Name",
    "Group",
    "Rank",
    "Elapse Time(ms)",
    "Transit Time(ms)",
    "Wait Time(ms)",
    "Wait Time Ratio",
)
WAITS = ("Rank", "Waited For", "Wait Time(us)")


def write_csv(folder: Path, document: Json) -> tuple[Path, ...]:
    """Write the tables into `folder` (made if it is missing); returns their paths.

    Raises FormatError for a document of another version, ConfigError when the folder cannot be written.
    """
    check_document(document)
    tables: dict[str, tuple[Sequence[str], Iterable[Sequence[object]]]] = {
        "cluster_step_trace_time.csv": (STEP_TRACE, _step_trace(document)),
        "communication_matrix.csv": (MATRIX, _matrix(document)),
        "communication.csv": (COMMUNICATION, _communication(document)),
        "waits.csv": (WAITS, _waits(document)),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (heading, rows) in tables.items():
            with (folder / name).open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(heading)
                writer.writerows(rows)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
    return tuple(folder / name for name in tables)


def _step_trace(document: Json) -> Iterable[Sequence[object]]:
    for row in document["breakdown"]:
        exposed, bubble = row["communication_not_overlapped_us"], row["bubble_us"]
        exposed_without_bubble = None if exposed is None else round(exposed - (bubble or 0), 3)
        stage = None if row["e2e_us"] is None else round(row["e2e_us"] - (bubble or 0), 3)
        yield (
            row["step"],
            "rank",
            row["rank"],
            row["computing_us"],
            exposed,
            row["overlapped_us"],
            row["communication_us"],
            row["free_us"],
            stage,
            bubble,
            exposed_without_bubble,
            row["preparing_us"],
        )


def _matrix(document: Json) -> Iterable[Sequence[object]]:
    for link in document["slow_link"]["links"]:
        time_ms = round(link["size_mb"] / link["bandwidth_gb_s"], 6) if link["bandwidth_gb_s"] else None
        yield link["src"], link["dst"], link["transport"], link["size_mb"], time_ms, link["bandwidth_gb_s"]


def _communication(document: Json) -> Iterable[Sequence[object]]:
    for row in document["collectives"]["slowest"]:
        for rank, elapse_us in row["duration_us"].items():
            wait_us = elapse_us - row["transfer_us"]
            times = (round(value / 1000, 6) for value in (elapse_us, row["transfer_us"], wait_us))
            ratio = round(wait_us / elapse_us, 4) if elapse_us else 0
            yield row["step"], row["kind"], row["group"], rank, *times, ratio


def _waits(document: Json) -> Iterable[Sequence[object]]:
    for row in document["waits"]:
        for peer, wait_us in row["waited_for"].items():
            yield row["rank"], peer, wait_us
