"""One rank's Ascend folder with text export: trace_view.json, communication*.json, step_trace_time.csv.

<host>_<pid>_<time>_ascend_pt/
    profiler_info_<rank>.json     the rank (a Device_id is not the rank)
    profiler_metadata.json        groups, where the framework wrote them
    ASCEND_PROFILER_OUTPUT/...    any of the tables may be missing; what is there is used
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import FormatError
from headrace.traces.ascend_names import declared_groups, group_of_operation, stage_of
from headrace.traces.ascend_tables import (
    TOTAL,
    OperationTime,
    collective_of,
    link_load,
    matrix_classes,
    operation_time,
    packet_sizes,
    read_json,
    read_step_trace,
    wait_times,
)
from headrace.traces.ascend_view import AscendView, read_view
from headrace.traces.breakdown import break_down, break_down_windows, lane_intervals
from headrace.traces.distributed_info import rank_in_name
from headrace.traces.free_time import launch_delay
from headrace.traces.timeline import Collective, Group, LinkLoad, RankTrace, StepLanes

OUTPUT = "ASCEND_PROFILER_OUTPUT"
_INFO = re.compile(r"profiler_info_(\d+)\.json$")


def output_folder(folder: Path) -> Path:
    """Where a rank's tables lie: in ASCEND_PROFILER_OUTPUT, or in the folder itself."""
    return folder / OUTPUT if (folder / OUTPUT).is_dir() else folder


def rank_of_folder(folder: Path) -> int | None:
    """profiler_info_<rank>.json, its `rank_id`, or the folder's name, in this order."""
    for path in sorted(folder.glob("profiler_info_*.json")):
        if found := _INFO.search(path.name):
            return int(found.group(1))
    for path in sorted(folder.glob("profiler_info*.json")):
        rank = read_json(path).get("rank_id")
        if isinstance(rank, int) and rank >= 0:
            return rank
    return rank_in_name(folder)


def groups_of_folder(folder: Path) -> dict[str, Group]:
    """Group id -> ranks, from profiler_metadata.json; {} where the file or the entry is missing."""
    path = folder / "profiler_metadata.json"
    return declared_groups(read_json(path)) if path.is_file() else {}


def read_ascend_text(folder: Path, *, keep_spans: bool = False) -> RankTrace:
    """Read one rank's folder. Raises FormatError when nothing in it can be read."""
    output, rank, groups = output_folder(folder), rank_of_folder(folder), groups_of_folder(folder)
    step_trace = read_step_trace(output / "step_trace_time.csv")
    published = tuple(lanes for _, lanes in step_trace.rows)
    numbers = [lanes.step for lanes in published if lanes.step is not None]
    path = output / "trace_view.json"
    view = read_view(path, rank=rank, groups=groups, steps_if_unmarked=numbers) if path.is_file() else None
    operations = tuple(_operations(output / "communication.json"))
    links = tuple(_links(output / "communication_matrix.json", groups))
    lanes = break_down(view.timeline, communication_is_visible=True) if view else ()
    if not (published or view or operations or links):
        raise FormatError(
            f"{folder} holds metadata only: no trace_view.json, communication*.json "
            "or whole line of step_trace_time.csv"
        )
    return RankTrace(
        rank=rank,
        source=str(folder),
        format="ascend_text",
        device="npu",
        stage=stage_of(rank, groups.values()),
        lanes=_number(lanes, published) or published,
        windows=break_down_windows(view.timeline, communication_is_visible=True) if view else (),
        published=published,
        collectives=_collectives(view, operations, groups),
        groups=tuple(groups.values()),
        peer_waits=view.peer_waits if view else (),
        links=links,
        packets=packet_sizes(_entries(output / "communication.json")),
        wait_times=wait_times(operations),
        launch_delay=launch_delay(view.timeline.tasks) if view else None,
        spans=lane_intervals(view.timeline) if view and keep_spans else (),
        num_events=view.num_events if view else 0,
        skipped_events=(view.skipped_events if view else 0) + step_trace.num_broken,
        notes=_notes(view, rank, groups, operations, links) + step_trace.notes,
    )


def _number(lanes: tuple[StepLanes, ...], published: tuple[StepLanes, ...]) -> tuple[StepLanes, ...]:
    """A trace without step marks whose table has several steps cannot be divided: then the table is taken."""
    if any(step.step is None for step in lanes) and len(published) > 1:
        return ()
    return lanes


def _sections(path: Path) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """(step, is point-to-point, entries) of communication.json and communication_matrix.json."""
    if not path.is_file():
        return
    for step, sections in read_json(path).items():
        for section, entries in (sections or {}).items():
            if isinstance(entries, dict):
                yield step, section == "p2p", entries


def _operations(path: Path) -> Iterator[OperationTime]:
    for step, is_p2p, entries in _sections(path):
        for key, entry in entries.items():
            if (row := operation_time(step, key, is_p2p, entry)) is not None:
                yield row


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    for _, _, entries in _sections(path):
        yield from (entry for key, entry in entries.items() if key != TOTAL)


def _links(path: Path, groups: dict[str, Group]) -> Iterator[LinkLoad]:
    for step, _, entries in _sections(path):
        for name in matrix_classes(entries):
            _, _, group = name.partition("@")
            for link, entry in entries[name].items():
                if (load := link_load(step, link, entry, group, groups, local=True)) is not None:
                    yield load


def _collectives(
    view: AscendView | None, operations: tuple[OperationTime, ...], groups: dict[str, Group]
) -> tuple[Collective, ...]:
    """From the timeline where there is one (exact times), else from the table."""
    if view and view.collectives:
        return view.collectives
    by_id = {row.group: group for row in operations if (group := group_of_operation(row.name, row.group, groups))}
    return tuple(collective_of(row, by_id) for row in operations)


def _notes(
    view: AscendView | None,
    rank: int | None,
    groups: dict[str, Group],
    operations: tuple[OperationTime, ...],
    links: tuple[LinkLoad, ...],
) -> tuple[str, ...]:
    notes = []
    if rank is None:
        notes.append("neither profiler_info_<rank>.json nor the folder's name says the rank")
    if view is None:
        notes.append("no trace_view.json: times come from the tables, whom a rank waited for is unknown")
    elif view.truncated:
        notes.append("trace_view.json ends in the middle")
    if view and view.skipped_events:
        notes.append(f"{view.skipped_events} broken events were skipped")
    if not operations:
        notes.append("no communication.json: Ascend's wait ratios are not there (profiler level 1 writes them)")
    if not groups and (links or (view and view.peer_waits)):
        notes.append("no parallel_group_info: peers and links count inside their group, taken as global ranks")
    return tuple(notes)
