"""Where a step's time goes: unions of intervals per kind of task, exact to the nanosecond.

Definitions (torch_npu's step_trace_time.csv and HolisticTraceAnalysis agree on them):
  computing       union of the compute kernels of all streams
  communication   union of the collective kernels
  overlapped      their intersection
  free            e2e - union of both; copies are free time, and reported beside it
  e2e             GPU: first start to last end of the step's device tasks, copies included
                  Ascend: the same without copies
                  CPU: the step mark itself
"""

from __future__ import annotations

import numpy as np

from headrace.traces.free_time import split_idle, split_idle_of_cpu
from headrace.traces.intervals import IntervalSet, clip, intersect, length_ns, merge, subtract
from headrace.traces.timeline import NO_STEP, StepLanes, TaskKind, Tasks, Timeline

COMPUTING = (TaskKind.MATRIX, TaskKind.VECTOR)
COMMUNICATION = (TaskKind.COMMUNICATION, TaskKind.RECEIVE)


def break_down(timeline: Timeline, *, communication_is_visible: bool) -> tuple[StepLanes, ...]:
    """Lanes of every step that has tasks; without step marks, of the whole trace as one unnumbered step.

    `communication_is_visible` False turns communication into None: a job of many ranks whose trace holds no collective
    kernel did communicate, the trace just does not show it.
    """
    tasks, steps = timeline.tasks, timeline.steps
    if len(steps) == 0:
        whole = _lanes(timeline, tasks, None, None, communication_is_visible)
        return (whole,) if whole else ()
    result = []
    for index, number in enumerate(steps.numbers.tolist()):
        own = tasks.where(tasks.step == index)
        mark = int(steps.start_ns[index]), int(steps.end_ns[index])
        lanes = _lanes(timeline, own, number, mark, communication_is_visible)
        if lanes is not None:
            result.append(lanes)
    return tuple(result)


def break_down_windows(timeline: Timeline, *, communication_is_visible: bool) -> tuple[tuple[str, StepLanes], ...]:
    """Lanes over all device tasks, and over all but the last step's (HolisticTraceAnalysis drops the last step)."""
    tasks = timeline.tasks
    if timeline.device == "cpu" or len(tasks) == 0:
        return ()
    last = len(timeline.steps) - 1
    chosen = {"all_device_events": np.ones(len(tasks), dtype=bool)}
    if last > 0:
        chosen["window_without_last_step"] = (tasks.step != last) & (tasks.step != NO_STEP)
    named = (
        (name, _lanes(timeline, tasks.where(own), None, None, communication_is_visible)) for name, own in chosen.items()
    )
    return tuple((name, lanes) for name, lanes in named if lanes is not None)


def lane_intervals(timeline: Timeline) -> tuple[tuple[str, IntervalSet], ...]:
    """The lanes as intervals, for export to a trace viewer."""
    tasks = timeline.tasks
    return (
        ("Computing", tasks.covered(*COMPUTING)),
        ("Communication", tasks.covered(*COMMUNICATION)),
        ("Copies", tasks.covered(TaskKind.COPY)),
        ("Step", np.stack([timeline.steps.start_ns, timeline.steps.end_ns], axis=1)),
    )


def _lanes(
    timeline: Timeline, tasks: Tasks, number: int | None, mark: tuple[int, int] | None, communication_is_visible: bool
) -> StepLanes | None:
    on_cpu = timeline.device == "cpu"
    matrix, computing = tasks.covered(TaskKind.MATRIX), tasks.covered(*COMPUTING)
    communication, receive = tasks.covered(*COMMUNICATION), tasks.covered(TaskKind.RECEIVE)
    copies = tasks.covered(TaskKind.COPY)
    if on_cpu and mark is not None:
        matrix, computing, communication, receive = (
            clip(lane, *mark) for lane in (matrix, computing, communication, receive)
        )
    if len(computing) == 0 and (on_cpu or len(communication) == 0):
        return None
    working = merge(computing, communication)
    busy = merge(working, copies)
    spanned = working if timeline.device == "npu" else busy
    start_ns, end_ns = mark if on_cpu and mark else (int(spanned[0, 0]), int(spanned[-1, 1]))
    if on_cpu:
        idle = split_idle_of_cpu(busy, timeline.loading, start_ns, end_ns)
    else:
        idle = split_idle(busy, tasks, timeline.loading, start_ns, end_ns)
    received = tasks.kind == int(TaskKind.RECEIVE)
    visible = communication_is_visible
    return StepLanes(
        step=number,
        start_ns=start_ns,
        e2e_ns=end_ns - start_ns,
        computing_ns=length_ns(computing),
        matrix_ns=None if on_cpu else length_ns(matrix),
        communication_ns=length_ns(communication) if visible else None,
        overlapped_ns=length_ns(intersect(computing, communication)) if visible else None,
        copies_ns=length_ns(copies),
        exposed_copies_ns=length_ns(clip(subtract(copies, working), start_ns, end_ns)),
        bubble_ns=int((tasks.end_ns[received] - tasks.start_ns[received]).sum()),
        exposed_bubble_ns=_alone_ns(receive, computing, tasks),
        preparing_ns=start_ns - mark[0] if mark and not on_cpu else None,
        **idle,
    )


def _alone_ns(receive: IntervalSet, computing: IntervalSet, tasks: Tasks) -> int:
    """Time in which nothing but a receive runs."""
    if len(receive) == 0:
        return 0
    return length_ns(subtract(receive, merge(computing, tasks.covered(TaskKind.COMMUNICATION))))


def waterfall(lanes: StepLanes) -> dict[str, int] | None:
    """What keeps the step from being matrix work: parts that sum to e2e, in nanoseconds; None without a split."""
    if lanes.computing_ns is None or lanes.matrix_ns is None or lanes.exposed_copies_ns is None:
        return None
    idle, exposed = lanes.idle_ns, lanes.not_overlapped_ns or 0
    bubble = lanes.exposed_bubble_ns or 0
    return {
        "matrix": lanes.matrix_ns,
        "vector": lanes.computing_ns - lanes.matrix_ns,
        "copies": lanes.exposed_copies_ns,
        "exposed_communication": exposed - bubble,
        "bubble": bubble,
        "free": idle or 0,
    }
