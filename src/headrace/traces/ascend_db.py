"""One rank's Ascend folder with database export: ascend_pytorch_profiler_<rank>.db and analysis.db.

The files are opened with `immutable=1`: a database in WAL mode, as published, would otherwise get -wal and -shm files
beside it even from a reader, and could not be opened at all in a read-only folder.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import msgspec
import numpy as np

from headrace.errors import FormatError
from headrace.traces.ascend_names import (
    NOTIFY_WAIT,
    TASK_KINDS,
    declared_groups,
    group_of_operation,
    peer_of,
    stage_of,
    sum_peer_waits,
)
from headrace.traces.ascend_tables import (
    OperationTime,
    link_load,
    matrix_classes,
    step_lanes,
    step_number,
    wait_times,
)
from headrace.traces.ascend_text import groups_of_folder, output_folder, rank_of_folder
from headrace.traces.breakdown import break_down, break_down_windows, lane_intervals
from headrace.traces.free_time import launch_delay
from headrace.traces.intervals import union
from headrace.traces.json_events import NOT_JSON
from headrace.traces.kernel_names import collective_kind, message_bytes
from headrace.traces.time_bounds import EARLIEST_NS, LATEST_NS
from headrace.traces.timeline import (
    NO_LAUNCH,
    NO_STEP,
    Collective,
    Group,
    LinkLoad,
    PeerWait,
    RankTrace,
    StepLanes,
    Steps,
    TaskKind,
    Tasks,
    Timeline,
)

_UNKNOWN = -(2**63)

_COMPUTE = """
    SELECT task.startNs, task.endNs, kind.value, COALESCE(call.startNs, :unknown)
    FROM TASK AS task
    JOIN COMPUTE_TASK_INFO AS info ON info.globalTaskId = task.globalTaskId
    JOIN STRING_IDS AS kind ON kind.id = info.taskType
    LEFT JOIN CANN_API AS call ON call.connectionId = task.connectionId
"""
_COPIES = """
    SELECT task.startNs, task.endNs, kind.value, COALESCE(call.startNs, :unknown)
    FROM TASK AS task
    JOIN STRING_IDS AS kind ON kind.id = task.taskType
    LEFT JOIN CANN_API AS call ON call.connectionId = task.connectionId
    WHERE kind.value IN ('MEMCPY_ASYNC', 'PCIE_DMA_SQE', 'SDMA_SQE')
"""
_OPERATIONS = """
    SELECT op.startNs, op.endNs, name.value, grp.value, op.count, type.name, COALESCE(call.startNs, :unknown), op.opId
    FROM COMMUNICATION_OP AS op
    JOIN STRING_IDS AS name ON name.id = op.opName
    LEFT JOIN STRING_IDS AS grp ON grp.id = op.groupName
    LEFT JOIN ENUM_HCCL_DATA_TYPE AS type ON type.id = op.dataType
    LEFT JOIN CANN_API AS call ON call.connectionId = op.connectionId
    ORDER BY op.startNs
"""
_WAITS = """
    SELECT info.opId, info.srcRank, info.dstRank, SUM(task.endNs - task.startNs)
    FROM COMMUNICATION_TASK_INFO AS info
    JOIN TASK AS task ON task.globalTaskId = info.globalTaskId
    JOIN STRING_IDS AS kind ON kind.id = info.taskType
    WHERE kind.value = :notify_wait
    GROUP BY info.opId, info.srcRank, info.dstRank
"""
_LOADING = """
    SELECT CAST(api.startNs AS INTEGER), CAST(api.endNs AS INTEGER) FROM PYTORCH_API AS api
    JOIN STRING_IDS AS name ON name.id = api.name WHERE name.value LIKE 'enumerate(DataLoader)%'
"""


def profiler_database(folder: Path) -> Path | None:
    """The rank's timeline database; None where there is none."""
    output = output_folder(folder)
    found = sorted([*output.glob("ascend_pytorch_profiler*.db"), *output.glob("ascend_mindspore_profiler*.db")])
    return found[0] if found else None


def read_ascend_db(folder: Path, *, keep_spans: bool = False) -> RankTrace:
    """Read one rank's folder. Raises FormatError for files that are no database or lack what the timeline needs."""
    path = profiler_database(folder)
    if path is None:
        raise FormatError(f"{folder} holds no ascend_pytorch_profiler_<rank>.db")
    with open_immutable(path) as db:
        groups = groups_of_folder(folder) or declared_groups(_metadata(db))
        rank = _rank(db)
        rank = rank if rank is not None else rank_of_folder(folder)
        timeline, operations = _timeline(db)
        collectives = _collectives(operations, timeline, groups)
        peer_waits = _peer_waits(db, operations, timeline, rank, groups)
        host, chip = _host(db), _chip(db)
    analysis = output_folder(folder) / "analysis.db"
    times, links, published = _analysis(analysis, groups) if analysis.is_file() else ((), (), ())
    return RankTrace(
        rank=rank,
        source=str(folder),
        format="ascend_db",
        device="npu",
        host=host,
        chip=chip,
        stage=stage_of(rank, groups.values()),
        lanes=break_down(timeline, communication_is_visible=True) or published,
        windows=break_down_windows(timeline, communication_is_visible=True),
        published=published,
        collectives=collectives,
        groups=tuple(groups.values()),
        peer_waits=peer_waits,
        links=links,
        wait_times=wait_times(times),
        launch_delay=launch_delay(timeline.tasks),
        spans=lane_intervals(timeline) if keep_spans else (),
        num_events=len(timeline.tasks),
        notes=_notes(rank, groups, peer_waits, has_analysis=analysis.is_file()),
    )


@contextmanager
def open_immutable(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection that leaves nothing beside the file. sqlite3 errors become FormatError."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)) as db:
            yield db
    except sqlite3.Error as error:
        raise FormatError(f"{path} cannot be read as an Ascend database: {error}") from error


def tables_of(db: sqlite3.Connection) -> set[str]:
    """Names of the tables; which exist depends on the profiler's version and level."""
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _timeline(db: sqlite3.Connection) -> tuple[Timeline, list[tuple[object, ...]]]:
    """The tasks (compute, copies, then operations in the order returned beside them) and the steps they belong to."""
    tables = tables_of(db)
    named = {"unknown": _UNKNOWN}
    rows = [
        (start_ns, end_ns, TASK_KINDS[task_type], launch_ns)
        for query, needed in ((_COMPUTE, {"TASK", "COMPUTE_TASK_INFO"}), (_COPIES, {"TASK"}))
        if needed | {"CANN_API", "STRING_IDS"} <= tables
        for start_ns, end_ns, task_type, launch_ns in db.execute(query, named)
        if task_type in TASK_KINDS
    ]
    operations = list(db.execute(_OPERATIONS, named)) if {"COMMUNICATION_OP", "CANN_API"} <= tables else []
    rows += [(op[0], op[1], _operation_kind(op[2]), op[6]) for op in operations]
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    if ((table[:, :2] < EARLIEST_NS) | (table[:, :2] > LATEST_NS)).any():
        raise ValueError("a task starts or ends at no moment of a trace")
    steps = _steps(db) if "STEP_TIME" in tables else _steps_from([])
    belongs_by = np.where(table[:, 3] == NO_LAUNCH, table[:, 0], table[:, 3])
    loading = list(db.execute(_LOADING)) if "PYTORCH_API" in tables else []
    ranges = np.array(loading, dtype=np.int64).reshape(-1, 2)
    tasks = Tasks(
        start_ns=table[:, 0],
        end_ns=table[:, 1],
        kind=table[:, 2].astype(np.uint8),
        step=steps.index_of(belongs_by),
        launch_ns=table[:, 3],
    )
    return Timeline(device="npu", steps=steps, tasks=tasks, loading=union(ranges[:, 0], ranges[:, 1])), operations


def _operation_kind(name: str) -> TaskKind:
    return TaskKind.RECEIVE if collective_kind(name) == "recv" else TaskKind.COMMUNICATION


def _steps(db: sqlite3.Connection) -> Steps:
    return _steps_from(list(db.execute("SELECT startNs, endNs, id FROM STEP_TIME ORDER BY startNs")))


def _steps_from(rows: list[tuple[int, int, int]]) -> Steps:
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Steps(numbers=table[:, 2], start_ns=table[:, 0], end_ns=table[:, 1])


def _step_of_operations(operations: list[tuple[object, ...]], timeline: Timeline) -> list[int | None]:
    """Operations are the last tasks of the timeline."""
    first = len(timeline.tasks) - len(operations)
    numbers = timeline.steps.numbers
    return [None if index == NO_STEP else int(numbers[index]) for index in timeline.tasks.step[first:].tolist()]


def _collectives(
    operations: list[tuple[object, ...]], timeline: Timeline, groups: dict[str, Group]
) -> tuple[Collective, ...]:
    found = []
    for row, step in zip(operations, _step_of_operations(operations, timeline), strict=True):
        start_ns, end_ns, name, group_id, count, dtype = row[:6]
        assert isinstance(start_ns, int)
        assert isinstance(end_ns, int)
        group = group_of_operation(str(name), str(group_id or ""), groups)
        kind = collective_kind(str(name))
        elements = int(count) if isinstance(count, (int, float)) else None
        size = len(group.ranks) if group else None
        found.append(
            Collective(
                step=step,
                kind=kind,
                start_ns=start_ns,
                duration_ns=end_ns - start_ns,
                group=group,
                key=f"{name}@{group_id}",
                in_elements=elements,
                dtype=str(dtype) if dtype is not None else None,
                num_bytes=message_bytes(kind, elements, None, str(dtype), size),
            )
        )
    return tuple(found)


def _peer_waits(
    db: sqlite3.Connection,
    operations: list[tuple[object, ...]],
    timeline: Timeline,
    rank: int | None,
    groups: dict[str, Group],
) -> tuple[PeerWait, ...]:
    if "COMMUNICATION_TASK_INFO" not in tables_of(db):
        return ()
    known = {
        row[7]: (str(row[2]), group_of_operation(str(row[2]), str(row[3] or ""), groups), step)
        for row, step in zip(operations, _step_of_operations(operations, timeline), strict=True)
    }
    found = []
    for operation_id, src, dst, wait_ns in db.execute(_WAITS, {"notify_wait": NOTIFY_WAIT}):
        if operation_id not in known:
            continue
        name, group, step = known[operation_id]
        ranks = group.ranks if group else None
        peer = peer_of(ranks.index(rank) if ranks and rank in ranks else rank, src, dst)
        if peer is not None:
            peer = ranks[peer] if ranks and peer < len(ranks) else peer
            found.append(PeerWait(step=step, operation=name, peer=peer, wait_ns=wait_ns))
    return sum_peer_waits(found)


def _rank(db: sqlite3.Connection) -> int | None:
    if "RANK_DEVICE_MAP" not in tables_of(db):
        return None
    row = db.execute("SELECT rankId FROM RANK_DEVICE_MAP").fetchone()
    return row[0] if row and isinstance(row[0], int) and row[0] >= 0 else None


def _host(db: sqlite3.Connection) -> str | None:
    row = db.execute("SELECT hostName FROM HOST_INFO").fetchone() if "HOST_INFO" in tables_of(db) else None
    return str(row[0]) if row and row[0] else None


def _chip(db: sqlite3.Connection) -> str | None:
    row = db.execute("SELECT name FROM NPU_INFO").fetchone() if "NPU_INFO" in tables_of(db) else None
    return str(row[0]) if row and row[0] else None


def _metadata(db: sqlite3.Connection) -> dict[str, object]:
    if "META_DATA" not in tables_of(db):
        return {}
    row = db.execute("SELECT value FROM META_DATA WHERE name = 'parallel_group_info'").fetchone()
    try:
        return {"parallel_group_info": msgspec.json.decode(row[0])} if row else {}
    except (*NOT_JSON, TypeError):
        return {}


def _analysis(
    path: Path, groups: dict[str, Group]
) -> tuple[tuple[OperationTime, ...], tuple[LinkLoad, ...], tuple[StepLanes, ...]]:
    with open_immutable(path) as db:
        tables = tables_of(db)
        times = tuple(_operation_times(db)) if "CommAnalyzerTime" in tables else ()
        links = tuple(_links(db, groups)) if "CommAnalyzerMatrix" in tables else ()
        published = tuple(_published(db)) if "StepTraceTime" in tables else ()
    return times, links, published


def _operation_times(db: sqlite3.Connection) -> Iterator[OperationTime]:
    query = """SELECT step, hccl_op_name, group_name, type, start_timestamp,
                      elapse_time, transit_time, wait_time, idle_time FROM CommAnalyzerTime"""
    for step, name, group, section, start_us, elapse, transit, wait, idle in db.execute(query):
        yield OperationTime(
            step=step_number(step),
            name=name,
            group=str(group),
            is_p2p=section == "p2p",
            start_us=start_us,
            elapse_ms=elapse,
            transit_ms=transit,
            wait_ms=wait,
            idle_ms=idle,
        )


def _links(db: sqlite3.Connection, groups: dict[str, Group]) -> Iterator[LinkLoad]:
    query = """SELECT step, hccl_op_name, group_name, src_rank, dst_rank, transport_type, transit_size, transit_time
               FROM CommAnalyzerMatrix"""
    rows = list(db.execute(query))
    wanted = matrix_classes(row[1] for row in rows)
    for step, name, group, src, dst, transport, size, time in rows:
        if name in wanted:
            entry = {"Transport Type": transport, "Transit Size(MB)": size, "Transit Time(ms)": time}
            if (load := link_load(step, f"{src}-{dst}", entry, str(group), groups, local=True)) is not None:
                yield load


def _published(db: sqlite3.Connection) -> Iterator[StepLanes]:
    query = """SELECT step, computing, communication_not_overlapped, communication, overlapped, free, bubble, preparing
               FROM StepTraceTime"""
    for step, computing, not_overlapped, communication, overlapped, free, bubble, preparing in db.execute(query):
        yield step_lanes(
            step=step,
            computing=computing,
            not_overlapped=not_overlapped,
            communication=communication,
            overlapped=overlapped,
            free=free,
            bubble=bubble,
            preparing=preparing,
        )


def _notes(
    rank: int | None, groups: dict[str, Group], peer_waits: tuple[PeerWait, ...], *, has_analysis: bool
) -> tuple[str, ...]:
    notes = []
    if rank is None:
        notes.append("neither RANK_DEVICE_MAP nor profiler_info_<rank>.json says the rank")
    if not has_analysis:
        notes.append("no analysis.db: Ascend's wait ratios and the link matrix are not there")
    if not groups and peer_waits:
        notes.append("no parallel_group_info: peers and links count inside their group, taken as global ranks")
    return tuple(notes)
