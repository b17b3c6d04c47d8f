"""Ascend's trace_view.json: the timeline of one rank.

The file is one long list; `ts` is text with 16 digits and 3 decimals. Events are told apart by what they carry, since
the names of their processes may come after them:
  Ascend Hardware   args["Task Type"]                   when the device worked, and which unit
  HCCL              names hcom_... and Hccl...          collectives
  HCCL planes       args "src rank", "dst rank"         their small steps; a Notify_Wait says whom one waits for
  CANN              arrows HostToDevice<id>             when the CPU called; each ends where its task starts
  Python            ProfilerStep#N, enumerate(DataLoader)...
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from headrace.traces.ascend_names import (
    NOTIFY_WAIT,
    TASK_KINDS,
    group_of_operation,
    is_operation,
    peer_of,
    sum_peer_waits,
)
from headrace.traces.intervals import union
from headrace.traces.json_events import NOT_JSON, EventFile
from headrace.traces.kernel_names import MAX_COUNT, collective_kind, message_bytes
from headrace.traces.time_bounds import elapsed_ns, stamp_ns
from headrace.traces.timeline import (
    NO_LAUNCH,
    NO_STEP,
    Collective,
    Group,
    PeerWait,
    Steps,
    TaskKind,
    Tasks,
    Timeline,
)

_STEP = re.compile(r"ProfilerStep\s*#\s*(\d{1,18})(?!\d)")
_ARROW = "HostToDevice"


class _Args(msgspec.Struct, gc=False):
    task_type: str | None = msgspec.field(name="Task Type", default=None)
    src: int | str | None = msgspec.field(name="src rank", default=None)
    dst: int | str | None = msgspec.field(name="dst rank", default=None)
    count: int | float | str | None = None
    dtype: str | None = msgspec.field(name="data_type", default=None)


class _ViewEvent(msgspec.Struct, gc=False):
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: str | float | None = None
    dur: str | float | None = None
    ph: str = ""
    args: _Args | None = None


class _BareEvent(msgspec.Struct, gc=False):
    """For a batch with an event whose args are no object at all."""

    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: str | float | None = None
    dur: str | float | None = None
    ph: str = ""
    args: msgspec.Raw = msgspec.Raw(b"")


_Place: TypeAlias = tuple[int | str | None, int | str | None, int]
"""(process, thread, start_ns): where an arrow ends and a task starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Operation:
    name: str
    start_ns: int
    end_ns: int
    place: _Place
    count: int | None
    dtype: str | None


@dataclass(kw_only=True, slots=True)
class _Collected:
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    loading: list[tuple[int, int]] = field(default_factory=list)
    tasks: list[tuple[int, int, int]] = field(default_factory=list)
    """(start_ns, end_ns, kind)"""
    places: list[_Place] = field(default_factory=list)
    """Of each task."""
    operations: list[_Operation] = field(default_factory=list)
    waits: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(start_ns, duration_ns, src rank, dst rank), ranks inside the group"""
    calls: dict[str, int] = field(default_factory=dict)
    """Arrow -> when the CPU called"""
    arrivals: dict[_Place, str] = field(default_factory=dict)
    """Where an arrow ends -> the arrow"""
    num_events: int = 0
    num_broken: int = 0
    """Events whose times cannot be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AscendView:
    """What a trace_view.json says."""

    timeline: Timeline
    collectives: tuple[Collective, ...]
    peer_waits: tuple[PeerWait, ...]
    num_events: int
    skipped_events: int
    truncated: bool


def read_view(path: Path, *, rank: int | None, groups: dict[str, Group], steps_if_unmarked: list[int]) -> AscendView:
    """Read a trace_view.json. `steps_if_unmarked`: numbers from step_trace_time.csv; a single one names the whole trace
    when it carries no step mark. Raises FormatError."""
    file: EventFile[_ViewEvent | _BareEvent] = EventFile(path, _ViewEvent, _BareEvent)
    collected = _Collected()
    for batch in file:
        collected.num_events += len(batch)
        for event in batch:
            try:
                _collect(event, collected)
            except (ArithmeticError, ValueError):
                collected.num_broken += 1
    steps = _steps(collected, steps_if_unmarked)
    tasks = _tasks(collected, steps)
    loading = np.array(collected.loading, dtype=np.int64).reshape(-1, 2)
    return AscendView(
        timeline=Timeline(device="npu", steps=steps, tasks=tasks, loading=union(loading[:, 0], loading[:, 1])),
        collectives=_collectives(collected, tasks, steps, groups),
        peer_waits=_peer_waits(collected, tasks, steps, rank, groups),
        num_events=collected.num_events - collected.num_broken,
        skipped_events=file.skipped + collected.num_broken,
        truncated=file.truncated,
    )


def _collect(event: _ViewEvent | _BareEvent, into: _Collected) -> None:
    args = _args(event)
    if event.name.startswith(_ARROW):
        if event.ph == "s":
            into.calls.setdefault(event.name, _ns(event.ts))
        elif event.ph == "f":
            into.arrivals[event.pid, event.tid, _ns(event.ts)] = event.name
        return
    if event.ph != "X" or event.dur is None:
        return
    if args is not None and args.task_type in TASK_KINDS:
        start_ns = _ns(event.ts)
        kind = TaskKind.COPY if event.name == "MEMCPY_ASYNC" else TASK_KINDS[args.task_type]
        into.tasks.append((start_ns, start_ns + _duration_ns(event.dur), kind))
        into.places.append((event.pid, event.tid, start_ns))
    elif event.name == NOTIFY_WAIT and args is not None and isinstance(args.src, int) and isinstance(args.dst, int):
        into.waits.append((_ns(event.ts), _duration_ns(event.dur), args.src, args.dst))
    elif is_operation(event.name):
        start_ns = _ns(event.ts)
        count = args.count if args is not None and isinstance(args.count, int) and args.count <= MAX_COUNT else None
        into.operations.append(
            _Operation(
                name=event.name,
                start_ns=start_ns,
                end_ns=start_ns + _duration_ns(event.dur),
                place=(event.pid, event.tid, start_ns),
                count=count,
                dtype=args.dtype if args is not None else None,
            )
        )
    elif step := _STEP.match(event.name):
        start_ns = _ns(event.ts)
        into.steps.setdefault(int(step.group(1)), (start_ns, start_ns + _duration_ns(event.dur)))
    elif "DataLoader" in event.name and event.name.startswith("enumerate("):
        start_ns = _ns(event.ts)
        into.loading.append((start_ns, start_ns + _duration_ns(event.dur)))


def _steps(collected: _Collected, steps_if_unmarked: list[int]) -> Steps:
    marked = sorted((start_ns, end_ns, number) for number, (start_ns, end_ns) in collected.steps.items())
    if not marked and len(steps_if_unmarked) == 1 and (collected.tasks or collected.operations):
        starts = [task[0] for task in collected.tasks] + [operation.start_ns for operation in collected.operations]
        ends = [task[1] for task in collected.tasks] + [operation.end_ns for operation in collected.operations]
        marked = [(min(starts), max(ends) + 1, steps_if_unmarked[0])]
    rows = np.array(marked, dtype=np.int64).reshape(-1, 3)
    return Steps(numbers=rows[:, 2], start_ns=rows[:, 0], end_ns=rows[:, 1])


def _tasks(collected: _Collected, steps: Steps) -> Tasks:
    """Hardware tasks first, then the collectives, in the order of `collected`."""
    rows = collected.tasks + [(op.start_ns, op.end_ns, _operation_kind(op.name)) for op in collected.operations]
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    places = collected.places + [operation.place for operation in collected.operations]
    arrows = [collected.arrivals.get(place, "") for place in places]
    launch_ns = np.array([collected.calls.get(arrow, NO_LAUNCH) for arrow in arrows], dtype=np.int64)
    belongs_by = np.where(launch_ns == NO_LAUNCH, table[:, 0], launch_ns)
    return Tasks(
        start_ns=table[:, 0],
        end_ns=table[:, 1],
        kind=table[:, 2].astype(np.uint8),
        step=steps.index_of(belongs_by),
        launch_ns=launch_ns,
    )


def _operation_kind(name: str) -> TaskKind:
    return TaskKind.RECEIVE if collective_kind(name) == "recv" else TaskKind.COMMUNICATION


def _collectives(collected: _Collected, tasks: Tasks, steps: Steps, groups: dict[str, Group]) -> tuple[Collective, ...]:
    first = len(collected.tasks)
    found = []
    for place, operation in enumerate(collected.operations):
        index = int(tasks.step[first + place])
        kind = collective_kind(operation.name)
        group = group_of_operation(operation.name, "", groups)
        found.append(
            Collective(
                step=None if index == NO_STEP else int(steps.numbers[index]),
                kind=kind,
                start_ns=operation.start_ns,
                duration_ns=operation.end_ns - operation.start_ns,
                group=group,
                key=operation.name,
                in_elements=operation.count,
                dtype=operation.dtype,
                num_bytes=message_bytes(
                    kind, operation.count, None, operation.dtype, len(group.ranks) if group else None
                ),
            )
        )
    return tuple(sorted(found, key=lambda collective: collective.start_ns))


def _peer_waits(
    collected: _Collected, tasks: Tasks, steps: Steps, rank: int | None, groups: dict[str, Group]
) -> tuple[PeerWait, ...]:
    """Each wait belongs to the operation that runs when it starts."""
    first = len(collected.tasks)
    spans = sorted(
        (operation.start_ns, operation.end_ns, operation.name, int(tasks.step[first + place]))
        for place, operation in enumerate(collected.operations)
    )
    starts = np.array([span[0] for span in spans], dtype=np.int64)
    found = []
    for start_ns, duration_ns, src, dst in collected.waits:
        place = int(np.searchsorted(starts, start_ns, side="right")) - 1
        if place < 0 or start_ns >= spans[place][1]:
            continue
        _, _, name, index = spans[place]
        group = group_of_operation(name, "", groups)
        ranks = group.ranks if group else None
        own = ranks.index(rank) if ranks and rank in ranks else rank
        peer = peer_of(own, src, dst)
        if peer is None:
            continue
        found.append(
            PeerWait(
                step=None if index == NO_STEP else int(steps.numbers[index]),
                operation=name,
                peer=ranks[peer] if ranks and peer < len(ranks) else peer,
                wait_ns=duration_ns,
            )
        )
    return sum_peer_waits(found)


def _args(event: _ViewEvent | _BareEvent) -> _Args | None:
    if isinstance(event, _ViewEvent):
        return event.args
    try:
        return msgspec.json.decode(event.args, type=_Args)
    except NOT_JSON:
        return None


def _ns(stamp: str | float | None) -> int:
    """Exact nanoseconds of a microsecond stamp; a stamp of 19 digits only survives as text."""
    return stamp_ns(Decimal(stamp) * 1000 if isinstance(stamp, str) else (stamp or 0.0) * 1000)


def _duration_ns(length: str | float | None) -> int:
    return elapsed_ns(Decimal(length) * 1000 if isinstance(length, str) else (length or 0.0) * 1000)
