"""Bracket the phases of a training step: two clock readings per span, and the parts sum to the step.

    step = Step()
    for batch in step.batches(loader):
        with step.forward:
            loss = model(batch)
        with step.backward:
            loss.backward()
        with step.optimizer:
            optimizer.step()
        step.end()

At every border the time since the last border is booked on the phase the loop was in. Nested spans therefore get their
own time and no moment is counted twice or lost. A span costs about 0.6 us; nothing grows with the length of the run.
What can wait does: see Note [Cold code].
Nothing in here may stop a training: what goes wrong inside is kept in `failure`, logged once, and measuring ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import get_ident
from time import perf_counter_ns
from types import TracebackType
from typing import TypeAlias, TypeVar

from headrace.measure.clock import Clock, NewEvent
from headrace.measure.device_timeline import DeviceTimeline, WaitingStep, without_device
from headrace.measure.phases import EXCLUDED, SLOT, SLOTS, Sight, StepTimes, divide

Batch = TypeVar("Batch")
Sink: TypeAlias = Callable[[StepTimes, object], None]
"""Gets every finished step, in order, with the payload given to `end`. On a device that is some steps later."""

Books: TypeAlias = tuple[int, list[int], list[int], frozenset[str], dict[str, str], list[str], object]
"""Of an ended step: index, totals_ns, counts, observed, spoiled, notes, payload. A tuple, for it is made cold."""

log = logging.getLogger("headrace.measure")

# Note [Cold code]
# A step of the model empties the caches of everything else. Dividing a step and writing its record takes 25 us in a
# loop of its own and 120 us behind a step of 21 ms, where each line of it comes back from memory. So the end of a step
# keeps the books and touches nothing else, and steps are divided several at a time: the first is slow, the others not.
MAX_KEPT = 16
"""Ended steps that may wait to be divided: bounded memory, and little is lost when the process is killed."""

NOBODY = -1
"""No thread has this identity: spans fall into the slow path, which looks why."""


SPANS: dict[str, str] = {
    "data": "data",
    "storage": "data/storage",
    "cpu_work": "data/cpu",
    "copy": "data/copy",
    "hand_out": "data/handout",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "post": "post",
    "communication": "communication",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
}
"""Attribute of a Step: the phase it books on."""


class Span:
    """`with step.forward:` books time on a phase. Made once per phase and entered again and again, also nested."""

    __slots__ = ("slot", "step")

    def __init__(self, step: Step, slot: int) -> None:
        self.step, self.slot = step, slot

    def __enter__(self) -> None:
        step = self.step
        if get_ident() != step.owner and not step.adopts_this_thread():
            return
        try:
            now = step.clock()
            current = step.current
            step.totals_ns[current] += now - step.border_ns
            step.open_slots.append(current)
            step.current = self.slot
            step.counts[self.slot] += 1
            step.border_ns = now
            if step.device is not None:
                step.device.mark(self.slot, now)
        except Exception as error:
            step.fail(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        step = self.step
        if get_ident() != step.owner:
            return
        try:
            now = step.clock()
            step.totals_ns[step.current] += now - step.border_ns
            step.border_ns = now
            if step.current == self.slot and step.open_slots:
                step.current = step.open_slots.pop()
            else:
                step.untangle(self.slot)
            if step.device is not None:
                step.device.mark(step.current, now)
        except Exception as failure:
            step.fail(failure)


class ExcludedSpan(Span):
    """`with step.evaluation:` takes time out of the step. Spans inside it (a model's hooks) are not booked."""

    __slots__ = ()

    def __enter__(self) -> None:
        step = self.step
        if step.excluded_by == get_ident():
            step.excluded_depth += 1
            return
        super().__enter__()
        if step.owner == get_ident():
            step.excluded_by, step.owner, step.excluded_depth = step.owner, NOBODY, 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        step = self.step
        if step.excluded_by != get_ident():
            return
        step.excluded_depth -= 1
        if step.excluded_depth == 0:
            step.owner, step.excluded_by = step.excluded_by, NOBODY
            super().__exit__(kind, error, traceback)


class Step:
    """The running step of one training loop. One thread uses it; spans from other threads are counted and left out.

    `clock` is the host's clock. `new_event` makes events on the device's queue; without it the host's spans are the
    truth, which is right where the host computes itself, and wrong around an asynchronous device: `blind` is then the
    reason why no phase can be given. `unseen` names phases that cannot be seen here, with reasons. `sink` gets each
    finished step; if it raises, measuring goes on without it. It gets them in groups: behind every `deliver_every`-th
    step, and in between when MAX_KEPT wait.
    """

    data: Span
    """Waiting for the next batch, as far as the parts below do not say it more precisely."""
    storage: Span
    cpu_work: Span
    copy: Span
    hand_out: Span
    forward: Span
    backward: Span
    optimizer: Span
    post: Span
    """After the update: metrics, logging, learning rate."""
    communication: Span
    """Waiting for a collective. Nested inside another phase it takes its time out of that phase."""
    evaluation: Span
    checkpoint: Span

    def __init__(
        self,
        *,
        clock: Clock = perf_counter_ns,
        new_event: NewEvent | None = None,
        blind: str | None = None,
        unseen: Mapping[str, str] | None = None,
        sink: Sink | None = None,
        deliver_every: int = 1,
    ) -> None:
        self.clock, self.blind, self.sink, self.deliver_every = clock, blind, sink, deliver_every
        self.device = None if new_event is None else DeviceTimeline(new_event)
        self.unseen = dict(unseen or {})
        self.observed: frozenset[str] = frozenset()
        self.failure: str | None = None
        self.index = self.delivered = 0
        self.kept: list[Books] = []
        """Ended steps on the host's clock; those of a device wait in its timeline."""
        self.owner = self.excluded_by = NOBODY
        self.excluded_depth = 0
        self.totals_ns, self.counts = [0] * len(SLOTS), [0] * len(SLOTS)
        self.open_slots: list[int] = []
        self.current = self.border_ns = self.foreign_spans = 0
        self.spoiled: dict[str, str] = {}
        self.notes: list[str] = []
        for attribute, phase in SPANS.items():
            kind = ExcludedSpan if phase in EXCLUDED else Span
            setattr(self, attribute, kind(self, SLOT[phase]))
        self.begin()

    def begin(self) -> None:
        """Start the running step anew, here and now, in whichever thread enters the first span. Never raises."""
        try:
            self.owner = self.excluded_by = NOBODY
            self.open_slots.clear()
            self.current = 0
            self.border_ns = self.clock()
            self.forget_step()
            if self.device is not None:
                self.device.marks.clear()
                self.device.mark(0, self.border_ns)
        except Exception as error:
            self.fail(error)

    def batches(self, source: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of `source`; the time inside its iterator is `data`."""
        with self.data:
            iterator = iter(source)
        while True:
            with self.data:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def observe(self, *phases: str) -> None:
        """These phases are watched from now on: a step without a span of them had none of it (0 instead of None)."""
        self.observed |= frozenset(phases)

    def spoil(self, phase: str, reason: str) -> None:
        """The running step's time of `phase` is wrong or incomplete: it becomes None. Any thread may call this."""
        self.spoiled.setdefault(phase, reason)

    def end(self, payload: object = None) -> None:
        """End the running step and start the next one. Call once per optimizer step. Never raises, never blocks.

        `payload` comes back with the finished step (how many samples it held, say).
        """
        if self.failure is not None:
            return
        if get_ident() not in (self.owner, self.excluded_by) and self.owner != self.excluded_by:
            self.notes.append("a step was ended from another thread; that was ignored")
            return
        try:
            now = self.clock()
            self.totals_ns[self.current] += now - self.border_ns
            self.border_ns = now
            if self.current or self.excluded_by != NOBODY:
                self.close_open_spans()
            if self.foreign_spans:
                self.notes.append(f"{self.foreign_spans} spans from other threads were left out")
            books = (self.index, self.totals_ns, self.counts, self.observed, self.spoiled, self.notes, payload)
            self.forget_step()
            if self.device is None:
                self.kept.append(books)
            else:
                self.device.finish_step(self.waiting_step(books), now)
            self.index = index = self.index + 1
            every, delivered = self.deliver_every, self.delivered
            if index // every > delivered // every or index - delivered >= MAX_KEPT:
                self.deliver_ended()
        except Exception as error:
            self.fail(error)

    def deliver_ended(self, *, wait: bool = False) -> None:
        """Give the ended steps to the sink, on a device those it has passed; `wait` blocks for the others."""
        if self.device is not None:
            self.deliver(self.device.passed(newest_too=wait, wait=wait))
            return
        steps = [self.waiting_step(books) for books in self.kept]
        self.kept = []
        self.deliver([(self.host_times(step), step.payload) for step in steps])

    def waiting_step(self, books: Books) -> WaitingStep:
        """An ended step's books under names."""
        index, totals_ns, counts, observed, spoiled, notes, payload = books
        sight = Sight(observed=observed, unseen=self.unseen, spoiled=spoiled)
        return WaitingStep(index, totals_ns, counts, sight, tuple(notes), payload)

    def host_times(self, step: WaitingStep) -> StepTimes:
        """The phases of an ended step by the host's clock, or the reason why that clock cannot give them."""
        if self.blind is not None:
            return without_device(step, self.blind)
        return divide(
            step.index,
            step.host_totals_ns,
            step.counts,
            timeline="host",
            sight=step.sight,
            scheduling_ns=None,
            host_totals_ns=step.host_totals_ns,
            notes=step.notes,
        )

    def close(self) -> None:
        """Deliver the steps that still wait, also for the device. The running step is dropped. Never raises."""
        try:
            self.deliver_ended(wait=True)
            self.failure = self.failure or "closed"
            self.owner = self.excluded_by = NOBODY
        except Exception as error:
            self.fail(error)

    def deliver(self, steps: list[tuple[StepTimes, object]]) -> None:
        """Give finished steps to the sink; a sink that raises is told apart from a broken measurement."""
        self.delivered += len(steps)
        for times, payload in steps:
            if self.sink is None:
                return
            try:
                self.sink(times, payload)
            except Exception:
                self.sink = None
                log.warning("the receiver of step times failed; nothing is recorded from here on", exc_info=True)

    def adopts_this_thread(self) -> bool:
        """Slow path of a span: the first span after `begin` decides which thread the loop runs in."""
        if self.failure is not None or self.excluded_by == get_ident():
            return False
        if self.owner == NOBODY and self.excluded_by == NOBODY:
            self.owner = get_ident()
            return True
        self.foreign_spans += 1
        return False

    def untangle(self, slot: int) -> None:
        """A span was closed that is not the innermost open one: close it, and say that both are wrong."""
        opened = [*self.open_slots, self.current]
        if slot not in opened[1:]:
            self.notes.append(f"a span of {SLOTS[slot]!r} was closed that was not open")
            return
        for name in (SLOTS[slot], SLOTS[self.current]):
            self.spoil(name.split("/")[0], f"spans of {SLOTS[slot]!r} and {SLOTS[self.current]!r} crossed")
        del opened[len(opened) - 1 - opened[::-1].index(slot)]
        self.open_slots[:], self.current = opened[:-1], opened[-1]

    def close_open_spans(self) -> None:
        """Spans still open when the step ends took time that is not theirs."""
        for slot in (*self.open_slots[1:], self.current):
            if slot:
                reason = f"a span of {SLOTS[slot]!r} was still open when the step ended"
                self.spoil(SLOTS[slot].split("/")[0], reason)
                self.notes.append(reason)
        if self.excluded_by != NOBODY:
            self.owner, self.excluded_by = self.excluded_by, NOBODY
        self.open_slots.clear()
        self.current = 0

    def forget_step(self) -> None:
        """Fresh books for the next step; the old ones now belong to the finished step."""
        self.totals_ns, self.counts = [0] * len(SLOTS), [0] * len(SLOTS)
        self.spoiled, self.notes, self.foreign_spans = {}, [], 0

    def fail(self, error: Exception) -> None:
        """Measuring ends here, training does not."""
        if self.failure is None:
            self.failure = f"{type(error).__name__}: {error}"
            log.warning("measuring stopped at step %d: %s", self.index, self.failure, exc_info=error)
        self.owner = self.excluded_by = NOBODY
