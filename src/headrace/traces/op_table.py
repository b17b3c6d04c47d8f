"""A plain table of operations, one line each: step, rank, dp_rank, stage, optype, mb_id, start_ts, duration (seconds).

The form in which ByteDance published its straggler traces (StragglerAnalysis; arXiv 2505.05713). It has no kernels and
no clock to compare ranks by, but computing time per step, and the pipeline stage to compare it within.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headrace.errors import FormatError
from headrace.traces.breakdown import break_down
from headrace.traces.intervals import EMPTY
from headrace.traces.kernel_names import collective_kind
from headrace.traces.time_bounds import span_ns, stamp_ns
from headrace.traces.timeline import NO_LAUNCH, Collective, Group, RankTrace, Steps, TaskKind, Tasks, Timeline

COLUMNS = ("step", "rank", "stage", "optype", "start_ts", "duration")

_DATA_PARALLEL = ("params-all-gather", "grads-reduce-scatter", "grads-all-reduce")
"""Operations of all ranks of one stage; others (layernorm, embedding) run in groups the table does not name."""


def is_op_table(path: Path) -> bool:
    """Does the first line name the columns?"""
    try:
        with _open(path) as file:
            header = next(csv.reader([file.readline(4096)]), [])
    except (OSError, UnicodeDecodeError, EOFError, csv.Error, zlib.error):
        return False
    return set(COLUMNS) <= set(header)


def read_op_table(path: Path) -> tuple[RankTrace, ...]:
    """Read the table; one RankTrace per rank in it. Raises FormatError with the line that is wrong."""
    by_rank: defaultdict[int, list[tuple[int, str, int, int]]] = defaultdict(list)
    stage_of: dict[int, int] = {}
    for step, rank, stage, optype, start_ns, end_ns in _rows(path):
        by_rank[rank].append((step, optype, start_ns, end_ns))
        stage_of[rank] = stage
    if not by_rank:
        raise FormatError(f"{path} has no rows below its heading")
    members = {
        stage: tuple(sorted(rank for rank, own in stage_of.items() if own == stage)) for stage in set(stage_of.values())
    }
    return tuple(
        RankTrace(
            rank=rank,
            source=str(path),
            format="op_table",
            stage=stage_of[rank],
            lanes=break_down(_timeline(rows), communication_is_visible=True),
            collectives=_collectives(rows, Group(name=f"stage {stage_of[rank]}", ranks=members[stage_of[rank]])),
            num_events=len(rows),
        )
        for rank, rows in sorted(by_rank.items())
    )


def _timeline(rows: list[tuple[int, str, int, int]]) -> Timeline:
    """Each step has its own clock, starting near 0: the steps are laid behind one another."""
    numbers = sorted({row[0] for row in rows})
    place = {number: index for index, number in enumerate(numbers)}
    longest = max(row[3] for row in rows) + 1
    offset = np.array([place[row[0]] * longest for row in rows], dtype=np.int64)
    kinds = [_kind(row[1]) for row in rows]
    known = np.array([kind is not None for kind in kinds])
    start_ns = (np.array([row[2] for row in rows], dtype=np.int64) + offset)[known]
    index = np.arange(len(numbers), dtype=np.int64)
    return Timeline(
        device="gpu",
        steps=Steps(numbers=np.array(numbers, dtype=np.int64), start_ns=index * longest, end_ns=(index + 1) * longest),
        tasks=Tasks(
            start_ns=start_ns,
            end_ns=(np.array([row[3] for row in rows], dtype=np.int64) + offset)[known],
            kind=np.array([kind for kind in kinds if kind is not None], dtype=np.uint8),
            step=start_ns // longest,
            launch_ns=np.full(len(start_ns), NO_LAUNCH),
        ),
        loading=EMPTY,
    )


def _kind(optype: str) -> TaskKind | None:
    """Passes of the model are computing (the optimizer is left out: its clipping waits for the other ranks)."""
    if optype.endswith("-compute"):
        return TaskKind.MATRIX
    kind = collective_kind(optype)
    if kind == "other":
        return None
    return TaskKind.RECEIVE if kind == "recv" else TaskKind.COMMUNICATION


def _collectives(rows: list[tuple[int, str, int, int]], group: Group) -> tuple[Collective, ...]:
    counts: defaultdict[tuple[int, str], int] = defaultdict(int)
    found = []
    for step, optype, start_ns, end_ns in sorted(rows, key=lambda row: (row[0], row[2])):
        if optype not in _DATA_PARALLEL:
            continue
        number = counts[step, optype]
        counts[step, optype] += 1
        found.append(
            Collective(
                step=step,
                kind=collective_kind(optype),
                start_ns=start_ns,
                duration_ns=end_ns - start_ns,
                group=group,
                key=f"{optype} {number} of step {step}",
            )
        )
    return tuple(found)


def _rows(path: Path) -> Iterator[tuple[int, int, int, str, int, int]]:
    with _open(path) as file:
        reader = csv.reader(file)
        header = next(reader)
        step, rank, stage, optype, start, duration = (header.index(name) for name in COLUMNS)
        for line, row in enumerate(reader, start=2):
            try:
                start_ns = stamp_ns(float(row[start]) * 1e9)
                end_ns = start_ns + span_ns(float(row[duration]) * 1e9)
                yield int(row[step]), int(row[rank]), int(row[stage]), row[optype], start_ns, end_ns
            except (ValueError, IndexError) as error:
                raise FormatError(f"{path}:{line} is no row of the table ({','.join(row)[:80]!r}): {error}") from error


def _open(path: Path):  # type: ignore[no-untyped-def]
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8", newline="") if packed else path.open(encoding="utf-8", newline="")
