"""PyTorch profiler traces (Kineto JSON) of GPUs of any vendor, and of CPU jobs over gloo: file -> RankTrace.

On a GPU a step owns the kernels whose launching call starts in its ProfilerStep range: kernels run later than their
step's Python code, by their own start they would be counted in the next step. On a CPU the range itself is the step.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headrace.traces.breakdown import break_down, break_down_windows, lane_intervals
from headrace.traces.distributed_info import DistributedInfo, rank_in_name, read_distributed_info
from headrace.traces.free_time import launch_delay
from headrace.traces.intervals import EMPTY, IntervalSet, Nanoseconds, clip, in_order, length_ns, union
from headrace.traces.json_events import EventFile
from headrace.traces.kineto_collectives import device_collective, gloo_collective
from headrace.traces.kineto_columns import KinetoColumns, NamedRange, Thread, read_columns
from headrace.traces.kineto_events import KernelArgs, LooseEvent
from headrace.traces.timeline import (
    NO_LAUNCH,
    NO_STEP,
    Collective,
    RankTrace,
    Steps,
    TaskKind,
    Tasks,
    Timeline,
)


def peek_rank(path: Path) -> tuple[int | None, int | None]:
    """(rank, world size) from the head of the file and its name: some kilobytes, whatever the file's size."""
    info = read_distributed_info(EventFile(path, LooseEvent).read_head())
    return (info.rank if info.rank is not None else rank_in_name(path)), info.world_size


def read_kineto(path: Path, *, keep_spans: bool = False) -> RankTrace:
    """Read one rank's trace. `keep_spans` keeps the lanes as intervals for export. Raises FormatError."""
    columns = read_columns(path)
    info = read_distributed_info(columns.envelope)
    steps = _steps(columns)
    on_device = len(columns.device_start) > 0
    timeline = _device_timeline(columns, steps) if on_device else _cpu_timeline(columns, steps)
    collectives = (_device_collectives if on_device else _cpu_collectives)(columns, info, timeline)
    visible = bool(collectives) or info.world_size == 1
    hidden_device = columns.names_accelerator and not on_device
    lanes = () if hidden_device else break_down(timeline, communication_is_visible=visible)
    rank = info.rank if info.rank is not None else rank_in_name(path)
    host, devices = columns.envelope.get("host_name"), columns.envelope.get("deviceProperties")
    chip = devices[0].get("name") if isinstance(devices, list) and devices and isinstance(devices[0], dict) else None
    return RankTrace(
        rank=rank,
        source=str(path),
        format="kineto",
        device=timeline.device,
        world_size=info.world_size,
        host=host if isinstance(host, str) else None,
        chip=chip if isinstance(chip, str) else None,
        lanes=lanes,
        windows=break_down_windows(timeline, communication_is_visible=visible),
        collectives=() if hidden_device else collectives,
        groups=info.groups,
        launch_delay=launch_delay(timeline.tasks),
        spans=lane_intervals(timeline) if keep_spans else (),
        num_events=columns.num_events,
        skipped_events=columns.skipped_events,
        notes=_notes(columns, info, rank, has_lanes=bool(lanes), visible=visible, on_device=on_device),
    )


def _steps(columns: KinetoColumns) -> Steps:
    """One range per step number: the longest, should several threads or a GPU copy carry the mark."""
    longest: dict[int, NamedRange] = {}
    for number, mark in columns.step_marks:
        if number not in longest or mark.duration_ns > longest[number].duration_ns:
            longest[number] = mark
    ordered = sorted(longest.items(), key=lambda item: item[1].start_ns)
    start_ns = np.array([mark.start_ns for _, mark in ordered], dtype=np.int64)
    duration_ns = np.array([mark.duration_ns for _, mark in ordered], dtype=np.int64)
    return Steps(
        numbers=np.array([number for number, _ in ordered], dtype=np.int64),
        start_ns=start_ns,
        end_ns=start_ns + duration_ns,
    )


def _device_timeline(columns: KinetoColumns, steps: Steps) -> Timeline:
    launch_ns = _launches(columns)
    belongs_by = np.where(launch_ns == NO_LAUNCH, columns.device_start, launch_ns)
    kind = columns.device_kind.copy()
    kind[[kernel.task for kernel in columns.collectives if _receives(kernel.args)]] = TaskKind.RECEIVE
    tasks = Tasks(
        start_ns=columns.device_start,
        end_ns=columns.device_start + columns.device_duration,
        kind=kind,
        step=steps.index_of(belongs_by),
        launch_ns=launch_ns,
    )
    return Timeline(device="gpu", steps=steps, tasks=tasks, loading=_loading(columns))


def _receives(args: KernelArgs) -> bool:
    """A point-to-point receive, by torch's own label."""
    return args.collective is not None and args.collective.lower().startswith("recv")


def _launches(columns: KinetoColumns) -> Nanoseconds:
    """For each device task the start of the call with its correlation id."""
    if len(columns.call_correlation) == 0:
        return np.full(len(columns.device_start), NO_LAUNCH)
    order = in_order(columns.call_correlation)
    sorted_ids = columns.call_correlation[order]
    index = np.minimum(sorted_ids.searchsorted(columns.device_correlation), len(sorted_ids) - 1)
    found = (sorted_ids[index] == columns.device_correlation) & (columns.device_correlation >= 0)
    return np.where(found, columns.call_start[order][index], NO_LAUNCH)


def _cpu_timeline(columns: KinetoColumns, steps: Steps) -> Timeline:
    """Computing: operators on the thread that carries the step marks. Communication: gloo's ranges on its workers."""
    running = _cut_at_steps(columns.operators.get(_main_thread(columns), EMPTY), steps)
    ranges = columns.cpu_collectives
    start = np.array([named.start_ns for named in ranges], dtype=np.int64)
    duration = np.array([named.duration_ns for named in ranges], dtype=np.int64)
    kinds = [TaskKind.RECEIVE if ":recv" in named.name else TaskKind.COMMUNICATION for named in ranges]
    start_ns = np.concatenate([running[:, 0], start])
    return Timeline(
        device="cpu",
        steps=steps,
        tasks=Tasks(
            start_ns=start_ns,
            end_ns=np.concatenate([running[:, 1], start + duration]),
            kind=np.array([TaskKind.VECTOR] * len(running) + kinds, dtype=np.uint8),
            step=steps.index_of(start_ns),
            launch_ns=np.full(len(start_ns), NO_LAUNCH),
        ),
        loading=_loading(columns),
    )


def _main_thread(columns: KinetoColumns) -> Thread:
    marked = [mark.thread for _, mark in columns.step_marks]
    if marked:
        return max(set(marked), key=marked.count)
    return max(columns.operators, key=lambda thread: length_ns(columns.operators[thread]), default=None)


def _cut_at_steps(intervals: IntervalSet, steps: Steps) -> IntervalSet:
    """A stretch of operators may cross the border of two steps; each step gets its own part."""
    if len(steps) == 0:
        return intervals
    windows = zip(steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True)
    return np.concatenate([clip(intervals, start_ns, end_ns) for start_ns, end_ns in windows])


def _loading(columns: KinetoColumns) -> IntervalSet:
    main = _main_thread(columns)
    ranges = [named for named in columns.loading if named.thread == main]
    start = np.array([named.start_ns for named in ranges], dtype=np.int64)
    return union(start, start + np.array([named.duration_ns for named in ranges], dtype=np.int64))


def _device_collectives(columns: KinetoColumns, info: DistributedInfo, timeline: Timeline) -> tuple[Collective, ...]:
    tasks, numbers = timeline.tasks, timeline.steps.numbers
    found = []
    for kernel in columns.collectives:
        index = int(tasks.step[kernel.task])
        found.append(
            device_collective(
                kernel.name,
                kernel.args,
                info,
                step=None if index == NO_STEP else int(numbers[index]),
                start_ns=int(tasks.start_ns[kernel.task]),
                duration_ns=int(columns.device_duration[kernel.task]),
            )
        )
    return tuple(sorted(found, key=lambda collective: collective.start_ns))


def _cpu_collectives(columns: KinetoColumns, info: DistributedInfo, timeline: Timeline) -> tuple[Collective, ...]:
    starts = np.array([named.start_ns for named in columns.cpu_collectives], dtype=np.int64)
    index = timeline.steps.index_of(starts)
    numbers = [None if step == NO_STEP else int(timeline.steps.numbers[step]) for step in index.tolist()]
    ranges = zip(columns.cpu_collectives, numbers, strict=True)
    found = (gloo_collective(named, info, number) for named, number in ranges)
    return tuple(sorted(found, key=lambda collective: collective.start_ns))


def _notes(
    columns: KinetoColumns, info: DistributedInfo, rank: int | None, *, has_lanes: bool, visible: bool, on_device: bool
) -> tuple[str, ...]:
    notes = []
    if rank is None:
        notes.append("the trace does not say its rank, nor does the file's name (rename it to rank_<N>.json)")
    if columns.truncated:
        notes.append("the file ends in the middle: it was cut off while being written or copied")
    if columns.skipped_events:
        notes.append(f"{columns.skipped_events} broken events were skipped")
    if not on_device and columns.names_accelerator:
        notes.append(
            "no device events: an accelerator took part, but the profile holds the CPU's side only "
            "(add ProfilerActivity.CUDA, XPU or PrivateUse1), so there is no breakdown"
        )
    elif not on_device and not has_lanes:
        notes.append("no device events, and no CPU operators inside a step: there is no breakdown")
    elif not on_device:
        notes.append("no device events: computing is the CPU operators of the thread that carries the step marks")
    if not columns.step_marks:
        notes.append("no step marks (profiler.step() was not called): the whole trace counts as one step")
    if has_lanes and not visible and (info.world_size is None or info.world_size > 1):
        notes.append("no communication kernels in the trace: communication is unknown, not zero")
    return tuple(notes)
