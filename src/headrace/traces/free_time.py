"""Why was the device idle? Splits the gaps between tasks, and measures how far the CPU runs ahead.

       CPU   ..... next() ........|call|
                                  ^ launch of B
    device   AAAAAAAA|                       |BBBBBBBB
                     `----- host ------`-wait-'
             data: the part of `host` that lies in a data-loading range

A gap ends where some task starts. Before that task was called for, the device waited for the host; afterwards the task
was on its way or waited for something else (an event, a copy, the driver): kernel wait. Without a launching call in
the trace the gap is unknown.
"""

from __future__ import annotations

import numpy as np

from headrace.traces.intervals import IntervalSet, gaps, in_order, intersect, length_ns, subtract, union
from headrace.traces.timeline import NO_LAUNCH, LaunchDelay, Tasks


def split_idle(busy: IntervalSet, tasks: Tasks, loading: IntervalSet, start_ns: int, end_ns: int) -> dict[str, int]:
    """Nanoseconds of data, host_launch, kernel_wait and unknown in the gaps of `busy` inside [start_ns, end_ns)."""
    idle = gaps(busy, start_ns, end_ns)
    launch_ns = _launch_of_next_task(idle, tasks)
    known = launch_ns != NO_LAUNCH
    called_ns = np.clip(launch_ns, idle[:, 0], idle[:, 1])
    host = union(idle[known, 0], called_ns[known])
    data = intersect(host, loading)
    return {
        "data_ns": length_ns(data),
        "host_launch_ns": length_ns(subtract(host, data)),
        "kernel_wait_ns": int((idle[known, 1] - called_ns[known]).sum()),
        "unknown_ns": length_ns(idle[~known]),
    }


def split_idle_of_cpu(busy: IntervalSet, loading: IntervalSet, start_ns: int, end_ns: int) -> dict[str, int]:
    """On a CPU job the host is the device: outside operators it loads data or runs Python (host_launch)."""
    idle = gaps(busy, start_ns, end_ns)
    data = intersect(idle, loading)
    return {
        "data_ns": length_ns(data),
        "host_launch_ns": length_ns(idle) - length_ns(data),
        "kernel_wait_ns": 0,
        "unknown_ns": 0,
    }


def launch_delay(tasks: Tasks) -> LaunchDelay | None:
    """Quantiles of start - launching call; None when no task's call is in the trace."""
    launched = tasks.launch_ns != NO_LAUNCH
    if not launched.any():
        return None
    delay_us = np.sort(tasks.start_ns[launched] - tasks.launch_ns[launched]) / 1000
    # np.quantile's definition; its first call imports numpy.ma, which takes a quarter of reading a 54 MB trace.
    place = np.arange(len(delay_us), dtype=np.float64)
    p50, p90, p99 = np.interp(np.array([0.5, 0.9, 0.99]) * (len(delay_us) - 1), place, delay_us)
    return LaunchDelay(
        num_launches=len(delay_us),
        p50_us=float(p50),
        p90_us=float(p90),
        p99_us=float(p99),
        max_us=float(delay_us[-1]),
    )


def _launch_of_next_task(idle: IntervalSet, tasks: Tasks) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each gap the launch of the (first recorded) task that ends it; NO_LAUNCH where its call is unknown."""
    if len(tasks) == 0:
        return np.full(len(idle), NO_LAUNCH)
    order = in_order(tasks.start_ns)
    start_ns, launch_ns = tasks.start_ns[order], tasks.launch_ns[order]
    index = np.minimum(start_ns.searchsorted(idle[:, 1]), len(tasks) - 1)
    return np.where(start_ns[index] == idle[:, 1], launch_ns[index], NO_LAUNCH)
