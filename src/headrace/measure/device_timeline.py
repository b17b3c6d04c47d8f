"""The device's side of a step: marks in its queue, read when they have passed.

The host puts an event into the queue at every border between two spans. Between two neighbouring events the device
either worked or had nothing to do; both are booked on the span the host was in, so `data` becomes the time the device
was kept waiting for the batch, and `communication` the time its stream was held by a collective.

Outside every span there is one thing more to learn. The host knows when it put the mark down; if the device reached
the end of the last span before the host had even opened the next one, its queue had run dry: that part is scheduling.
Both clocks are brought together by the earliest arrival: a mark cannot pass before it was put down, and the mark that
passed soonest after it met an empty queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from headrace.measure.clock import DeviceEvent, NewEvent
from headrace.measure.phases import COMPUTING, EXCLUDED, SLOT, SLOTS, Sight, StepTimes, divide

MAX_MARKS_PER_STEP = 8192
"""Borders in one step. 512 micro batches with eight spans each; beyond it the step's device times are given up."""
MAX_STEPS_BEHIND = 16
"""Steps whose marks may be waiting. A healthy loop is one or two ahead of its device."""


@dataclass(slots=True)
class Mark:
    """A border: from here on the host was in `slot`. `host_ns` is when it was put down."""

    slot: int
    host_ns: int
    event: DeviceEvent


@dataclass(slots=True)
class WaitingStep:
    """A step the loop has left: its books, as they were kept. On a device its last mark is the next step's first."""

    index: int
    host_totals_ns: list[int]
    counts: list[int]
    sight: Sight
    notes: tuple[str, ...]
    payload: object = None
    marks: list[Mark] = field(default_factory=list)
    reason: str | None = None
    """Why there will be no device times (too many marks, a failed call)."""


@dataclass(slots=True)
class DeviceTimeline:
    """Marks of the running step and of those the device has not finished. Bounded; reads never block.

    Owned by one `Step` and used from its thread. Whatever the device's library raises ends up in `reason`.
    """

    new_event: NewEvent
    marks: list[Mark] = field(default_factory=list)
    waiting: deque[WaitingStep] = field(default_factory=deque)
    free: list[DeviceEvent] = field(default_factory=list)
    reason: str | None = None

    def mark(self, slot: int, host_ns: int) -> None:
        """Put an event into the device's queue; from here on the host is in `slot`."""
        if self.reason is not None or len(self.marks) >= MAX_MARKS_PER_STEP:
            return
        try:
            event = self.free.pop() if self.free else self.new_event()
            event.record()
        except Exception as error:  # a device library may raise anything; training goes on without device times
            self.reason = f"device events failed: {type(error).__name__}: {error}"
            return
        self.marks.append(Mark(slot, host_ns, event))

    def finish_step(self, step: WaitingStep, now_ns: int) -> None:
        """Close the running step at `now_ns`; its last mark opens the next one."""
        if len(self.marks) >= MAX_MARKS_PER_STEP:
            step.reason = f"more than {MAX_MARKS_PER_STEP} borders between spans in one step"
            self.marks = []
        self.mark(0, now_ns)
        step.reason = step.reason or self.reason
        step.marks, self.marks = self.marks, self.marks[-1:]
        self.waiting.append(step)

    def passed(self, *, newest_too: bool = False, wait: bool = False) -> list[tuple[StepTimes, object]]:
        """The steps whose marks the device has passed, oldest first, with their payloads.

        The step just ended is left alone unless `newest_too`: its marks have hardly passed, and asking costs a call
        each. `wait` blocks for the last mark; only for closing. Steps too far behind come back without device times.
        """
        done: list[tuple[StepTimes, object]] = []
        while len(self.waiting) > (0 if newest_too else 1):
            step = self.waiting[0]
            times = self.read(step, wait=wait, give_up=len(self.waiting) > MAX_STEPS_BEHIND)
            if times is None:
                break
            self.waiting.popleft()
            done.append((times, step.payload))
        return done

    def read(self, step: WaitingStep, *, wait: bool, give_up: bool) -> StepTimes | None:
        """The step's times; None when the device has not passed its marks yet (never None with `give_up`)."""
        if step.reason is None:
            try:
                if wait:
                    step.marks[-1].event.synchronize()
                if all(mark.event.query() for mark in reversed(step.marks)):
                    times = device_times(step)
                    self.free.extend(mark.event for mark in step.marks[:-1])
                    return times
            except Exception as error:  # as in mark()
                step.reason = f"device events failed: {type(error).__name__}: {error}"
        if step.reason is None:
            if not give_up and not wait:
                return None
            step.reason = f"the device was more than {MAX_STEPS_BEHIND} steps behind the host"
        return without_device(step, step.reason)


def device_times(step: WaitingStep) -> StepTimes:
    """Book the device time between neighbouring marks on the span the host was in."""
    marks = step.marks
    gaps_ns = [round(a.event.elapsed_time(b.event) * 1e6) for a, b in pairwise(marks)]
    totals = [0] * len(SLOTS)
    for mark, gap in zip(marks, gaps_ns, strict=False):
        totals[mark.slot] += gap
    idle = idle_between_spans_ns([mark.slot for mark in marks], [mark.host_ns for mark in marks], gaps_ns)
    return divide(
        step.index,
        totals,
        step.counts,
        timeline="device",
        sight=step.sight,
        scheduling_ns=idle,
        host_totals_ns=step.host_totals_ns,
        notes=step.notes,
    )


def idle_between_spans_ns(slots: Sequence[int], host_ns: Sequence[int], gaps_ns: Sequence[int]) -> int:
    """Nanoseconds in which the device stood still outside every span because the host had not asked for more.

    `slots` and `host_ns` are [marks]; `gaps_ns` [marks - 1] is device time from a mark to the next. Work asked for
    outside the spans hides in the same gap; it is counted as idle up to the moment the next span opens.
    """
    device_ns, reached = 0, [0]
    for gap in gaps_ns:
        device_ns += gap
        reached.append(device_ns)
    # See the module: the smallest (arrival - put down) is zero by definition, which aligns the two clocks.
    ahead = min(arrival - (put - host_ns[0]) for arrival, put in zip(reached, host_ns, strict=True))
    idle = 0
    for position, gap in enumerate(gaps_ns):
        if slots[position] == SLOT["other"]:
            opened_next = host_ns[position + 1] - host_ns[0] + ahead
            idle += max(0, min(opened_next - reached[position], gap))
    return idle


def without_device(step: WaitingStep, reason: str) -> StepTimes:
    """The host's step time, with no phases: around an asynchronous device the host's spans only time the asking."""
    totals = [0] * len(SLOTS)
    for slot, name in enumerate(SLOTS):
        totals[slot if name in EXCLUDED else 0] += step.host_totals_ns[slot]
    hidden = ("data", *COMPUTING, "communication", "scheduling")
    sight = Sight(unseen=dict.fromkeys(hidden, reason), spoiled={})
    return divide(
        step.index,
        totals,
        step.counts,
        timeline="host",
        sight=sight,
        scheduling_ns=None,
        host_totals_ns=step.host_totals_ns,
        notes=step.notes,
    )
