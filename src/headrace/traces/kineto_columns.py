"""One pass over a Kineto file: the events that matter become columns, some 40 bytes each, whatever the file's size.

Operators of a CPU job are kept as unions per thread: their number does not matter. A job on a device has none at all.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.traces.byte_source import open_bytes
from headrace.traces.intervals import EMPTY, IntervalSet, merge, subtract, union
from headrace.traces.json_events import EventFile
from headrace.traces.kernel_names import compute_kind, is_communication
from headrace.traces.kineto_events import (
    CALLS,
    COPIES,
    DEVICE_CATEGORIES,
    AnyJobEvent,
    Copy,
    DeviceJobEvent,
    Event,
    Kernel,
    KernelArgs,
    LooseEvent,
    Operator,
    Range,
    arguments,
    microseconds_to_ns,
)
from headrace.traces.timeline import TaskKind

Int64: TypeAlias = npt.NDArray[np.int64]
Thread: TypeAlias = int | str | None

_STEP = re.compile(r"ProfilerStep\s*#\s*(\d{1,18})(?!\d)")
_LOADING = re.compile(r"(?i)dataloader|data_?load|^#*\s*data\b|get_batch|next_batch|fetch_batch|load_batch")
_ISSUES_COLLECTIVE = ("c10d::", "_c10d_functional::", "c10d_functional::", "_c10d_functional_autograd::")
"""Operators that only hand a collective over or wait for it: communication, not computing."""

_CPU_BACKENDS = ("gloo:", "mpi:", "ucc:")

_LONG_FLOAT_STAMP = re.compile(rb'"ts"\s*:\s*"?(\d{16,18})\.\d')
_DEVICE_CATEGORY = re.compile(rb'"cat"\s*:\s*"(?:' + "|".join(sorted(DEVICE_CATEGORIES)).encode() + rb')"')
OPERATORS_AT_ONCE = 1 << 12
"""Operators that wait for their union: some 600 KB, which stay in the cache."""

_SNIFFED_BYTES = 256 << 10
_STAMP_SEEN_BYTES = 32 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedRange:
    """A user annotation that means something to the analysis."""

    name: str
    thread: Thread
    start_ns: int
    duration_ns: int
    args: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveKernel:
    """A collective on the device: its place among the device tasks, and what the trace says about it."""

    task: int
    name: str
    args: KernelArgs


@dataclass(frozen=True, kw_only=True, slots=True)
class KinetoColumns:
    """The events of one file that matter. Device arrays share one length, call arrays another; times in ns."""

    envelope: dict[str, Any]
    origin_ns: int
    """To add to every time here: stamps of 19 digits are kept relative to the first one."""
    device_start: Int64
    device_duration: Int64
    device_kind: npt.NDArray[np.uint8]
    device_correlation: Int64
    call_start: Int64
    call_correlation: Int64
    collectives: tuple[CollectiveKernel, ...]
    step_marks: tuple[tuple[int, NamedRange], ...]
    loading: tuple[NamedRange, ...]
    cpu_collectives: tuple[NamedRange, ...]
    operators: dict[Thread, IntervalSet]
    """Per thread: when an operator ran, those that only issue or await collectives left out."""
    names_accelerator: bool
    """Ranges such as nccl:all_reduce occur: an accelerator took part, whether its events are in the trace or not."""
    num_events: int
    skipped_events: int
    truncated: bool


def read_columns(path: Path) -> KinetoColumns:
    """Read a Kineto file. Raises FormatError when it is no trace; broken events are counted in `skipped_events`."""
    has_device_events, origin_us = _sniff(path)
    file: EventFile[Any]
    if origin_us:
        file = EventFile(path, LooseEvent)
    else:
        file = EventFile(path, DeviceJobEvent if has_device_events else AnyJobEvent, LooseEvent)  # type: ignore[arg-type]
    collector = _Collector(origin_us)
    for batch in file:
        collector.add(batch)
    return collector.columns(file)


class _Collector:
    """Sorts the events of each window by class, while they are in the cache, and appends what matters to columns."""

    def __init__(self, origin_us: int) -> None:
        self._origin_us = origin_us
        self._device = _DeviceColumns()
        self._call_start_us, self._call_correlation = array("d"), array("q")
        self._num_events = self._num_broken = 0
        self._kind_of_name: dict[str, TaskKind] = {}
        self._collectives: list[CollectiveKernel] = []
        self._steps: list[tuple[int, NamedRange]] = []
        self._loading: list[NamedRange] = []
        self._cpu_collectives: list[NamedRange] = []
        self._names_accelerator = False
        self._running: defaultdict[Thread, IntervalSet] = defaultdict(lambda: EMPTY)
        self._issuing: defaultdict[Thread, IntervalSet] = defaultdict(lambda: EMPTY)
        self._operators: list[Operator] = []
        self._wanted = {Kernel, *COPIES, *CALLS, Operator, Range, LooseEvent}

    def add(self, batch: list[Any]) -> None:
        """What a batch refers to in the window (`args` of a range) is read here: the next batch may overwrite it."""
        self._num_events += len(batch)
        # Two thirds are arrows and the like: they are passed over at the price of one look-up each.
        wanted = self._wanted
        kept = [event for event in batch if type(event) in wanted]
        if LooseEvent in map(type, kept):  # beside typed ones, where a batch was taken apart event by event
            kept = [event for one in kept if (event := self._typed(one)) is not None]
        if not kept:
            return
        if calls := [event for event in kept if type(event) in CALLS]:
            self._call_start_us.extend([call.ts for call in calls])
            self._call_correlation.extend([call.args.correlation for call in calls])
        if len(calls) == len(kept):
            return
        if copies := [event for event in kept if type(event) in COPIES]:
            self._device.extend(copies, [TaskKind.COPY] * len(copies))
        if kernels := [event for event in kept if type(event) is Kernel]:
            self._device.extend(kernels, self._kinds(kernels))
        for event in kept:
            if type(event) is Range:
                self._add_range(event)
        if len(self._device):
            self._wanted.discard(Operator)  # operators matter only where nothing else computes
        else:
            self._operators += [event for event in kept if type(event) is Operator]
            self._join_operators(at_least=OPERATORS_AT_ONCE)

    def _typed(self, event: Event | LooseEvent) -> Event | None:
        try:
            return event.typed(self._origin_us) if isinstance(event, LooseEvent) else event
        except (ArithmeticError, ValueError):
            self._num_broken += 1
            return None

    def _kinds(self, kernels: list[Kernel]) -> list[TaskKind]:
        known = self._kind_of_name
        for kernel in kernels:
            if kernel.name not in known:
                known[kernel.name] = _kind_of_kernel(kernel)
        of_each = [known[kernel.name] for kernel in kernels]
        if TaskKind.COMMUNICATION in of_each:
            for task, (kernel, kind) in enumerate(zip(kernels, of_each, strict=True), start=len(self._device)):
                if kind is TaskKind.COMMUNICATION:
                    self._collectives.append(CollectiveKernel(task=task, name=kernel.name, args=kernel.args))
        return of_each

    def _add_range(self, event: Range) -> None:
        step = _STEP.match(event.name)
        communicates = is_communication(event.name)
        loads = not step and not communicates and _LOADING.search(event.name) is not None
        if not (step or communicates or loads):
            return
        named = NamedRange(
            name=event.name,
            thread=event.tid,
            start_ns=int(microseconds_to_ns(np.array([event.ts]))[0]),
            duration_ns=int(microseconds_to_ns(np.array([event.dur]))[0]),
            args=arguments(event.args) if communicates else {},
        )
        if step:
            self._steps.append((int(step.group(1)), named))
        elif loads:
            self._loading.append(named)
        elif event.name.startswith(_CPU_BACKENDS):
            self._cpu_collectives.append(named)
        else:
            self._names_accelerator = True

    def _join_operators(self, *, at_least: int) -> None:
        """Many at a time: numpy's calls cost as much as fifty events."""
        if len(self._operators) < at_least:
            return
        per_thread: defaultdict[tuple[Thread, bool], list[Operator]] = defaultdict(list)
        for event in self._operators:
            per_thread[event.tid, event.name.startswith(_ISSUES_COLLECTIVE)].append(event)
        self._operators.clear()
        for (thread, issues), own in per_thread.items():
            start_ns = microseconds_to_ns(np.array([event.ts for event in own]))
            duration_ns = microseconds_to_ns(np.array([event.dur for event in own]))
            lane = self._issuing if issues else self._running
            lane[thread] = merge(lane[thread], union(start_ns, start_ns + duration_ns))

    def columns(self, file: EventFile[Any]) -> KinetoColumns:
        self._join_operators(at_least=1)
        device = self._device
        return KinetoColumns(
            envelope=file.envelope,
            origin_ns=self._origin_us * 1000,
            device_start=microseconds_to_ns(np.frombuffer(device.start_us)),
            device_duration=microseconds_to_ns(np.frombuffer(device.duration_us)),
            device_kind=np.frombuffer(device.kind, np.uint8),
            device_correlation=np.frombuffer(device.correlation, np.int64),
            call_start=microseconds_to_ns(np.frombuffer(self._call_start_us)),
            call_correlation=np.frombuffer(self._call_correlation, np.int64),
            collectives=tuple(self._collectives),
            step_marks=tuple(self._steps),
            loading=tuple(self._loading),
            cpu_collectives=tuple(self._cpu_collectives),
            operators={thread: subtract(lane, self._issuing[thread]) for thread, lane in self._running.items()},
            names_accelerator=self._names_accelerator,
            num_events=self._num_events - self._num_broken,
            skipped_events=file.skipped + self._num_broken,
            truncated=file.truncated,
        )


class _DeviceColumns:
    """One entry per device task: 25 bytes."""

    def __init__(self) -> None:
        self.start_us, self.duration_us = array("d"), array("d")
        self.kind, self.correlation = array("B"), array("q")

    def __len__(self) -> int:
        return len(self.kind)

    def extend(self, events: Sequence[Kernel | Copy], kinds: Sequence[TaskKind]) -> None:
        self.start_us.extend([event.ts for event in events])
        self.duration_us.extend([event.dur for event in events])
        self.correlation.extend([event.args.correlation for event in events])
        self.kind.extend(kinds)


def _sniff(path: Path) -> tuple[bool, int]:
    """(device events are in there for sure, whole microseconds to subtract before floats touch a stamp, else 0).

    Kineto writes device events last, so the tail shows them. A gzip has no cheap tail: there operators are collected
    until a device event comes, which costs time, never truth.
    """
    with open_bytes(path) as source:
        head = memoryview(bytearray(_SNIFFED_BYTES))
        text = bytes(head[: source.read_into(head)])
        packed = source.is_packed
    long_stamp = _LONG_FLOAT_STAMP.search(text, 0, _STAMP_SEEN_BYTES)
    origin_us = int(long_stamp.group(1)) if long_stamp else 0
    if not packed:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _SNIFFED_BYTES))
            text = file.read()
    return _DEVICE_CATEGORY.search(text) is not None, origin_us


def _kind_of_kernel(kernel: Kernel) -> TaskKind:
    if is_communication(kernel.name) or kernel.args.collective is not None:
        return TaskKind.COMMUNICATION
    return compute_kind(kernel.name)
