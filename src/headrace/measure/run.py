"""One measured training run: the step's times meet what the steps held, and become records, lines and a summary.

    run = Run(facts, step=step, ...)         headrace.torch.measure.start() makes it
    for batch in run.batches(loader):
        ...                                  spans of run.step, or hooks
        run.count(samples=8, tokens=8192)    once per micro batch
        run.end()                            once per optimizer step (or by the optimizer's hook)
    print(run.close())

Everything outside (clock, device, memory, gather, files, loggers) comes in as an argument, and whatever of it fails is
dropped with one warning: the training goes on, and so does the rest of the measuring.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from headrace.measure.counts import MicroBatch, StepCounts, add_up, kept_lengths
from headrace.measure.logline import Peaks, Window, metrics, summary_text, terminal_line
from headrace.measure.memory import (
    DeviceMemory,
    HostMemoryReader,
    MemoryEstimate,
    MemoryUse,
    ReadDeviceMemory,
    estimate_memory,
)
from headrace.measure.phases import StepTimes
from headrace.measure.record import RecordWriter, RunFacts, StepRecord, WindowRecord, step_record
from headrace.measure.sense import whole_at_least
from headrace.measure.slow_rank import Gather, RankWindow, SlowRank, SlowRankWatch, computing_s
from headrace.measure.step import Step
from headrace.measure.summary import Summary, Totals, summarise

Batch = TypeVar("Batch")
LogMetrics: TypeAlias = Callable[[dict[str, float], int], None]
"""log(metrics, step): one line for TensorBoard, W&B or MLflow."""

log = logging.getLogger("headrace.measure")


class Run:
    """Measures one training loop. Used from the loop's thread; nothing but the constructor raises.

    `step` times the phases; its sink becomes this run's. `records` is a folder (None: nothing is written).
    `log_metrics` and `print_line` get every `log_every`-th step, `read_device_memory` gives the peaks of the window.
    `gather` and `groups` watch for the slow rank. `at_close` is called by `close`, whatever happened.
    """

    def __init__(
        self,
        facts: RunFacts,
        *,
        step: Step,
        records: Path | None = None,
        log_every: int = 10,
        log_metrics: LogMetrics | None = None,
        print_line: Callable[[str], None] | None = None,
        read_device_memory: ReadDeviceMemory | None = None,
        gather: Gather | None = None,
        groups: Sequence[Sequence[int]] | None = None,
        at_close: Sequence[Callable[[], None]] = (),
    ) -> None:
        whole_at_least(1, log_every=log_every)
        self.facts, self.step, self.log_every = facts, step, log_every
        self.log_metrics, self.print_line = log_metrics, print_line
        self.read_device_memory, self.gather = read_device_memory, gather
        self.at_close = list(at_close)
        self.host_memory = HostMemoryReader()
        self.watch = SlowRankWatch(groups)
        self.writer = None if records is None else RecordWriter(records, facts)
        self.micro_batches: list[MicroBatch] = []
        """Of the running step."""
        self.window, self.total = Totals(), Totals()
        self.peaks = Peaks()
        self.last_counts: tuple[list[MicroBatch], StepCounts] = ([], StepCounts())
        """Those of the last step that could be counted."""
        self.slow_rank: SlowRank | None = None
        """The last verdict."""
        self.closed: Summary | None = None
        self.miscounted = False
        """A count made no sense: that was said once."""
        step.sink, step.deliver_every = self.take, log_every

    def batches(self, source: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of `source`; waiting for them is `data`."""
        return self.step.batches(source)

    def count(
        self,
        *,
        samples: int,
        tokens: int | None = None,
        padded_tokens: int | None = None,
        document_lengths: Sequence[int] | None = None,
    ) -> None:
        """Add one micro batch of this rank to the running step. All are host integers: nothing is synchronised.

        `tokens` are real tokens, `padded_tokens` those the model computes on; without them the share of padding is not
        known and operations are those of `tokens`. `document_lengths` are the true lengths of packed documents; without
        them every sample is one document. Never raises.
        """
        lengths = None if document_lengths is None else kept_lengths(document_lengths)
        self.micro_batches.append((samples, tokens, padded_tokens, lengths))

    def end(self) -> None:
        """End the running step. Never raises, never blocks."""
        micro_batches, self.micro_batches = self.micro_batches, []
        self.step.end(micro_batches)

    def counts_of(self, micro_batches: object) -> StepCounts:
        """The sums of a step; all unknown when a micro batch was counted in a way that makes no sense."""
        if not isinstance(micro_batches, list):
            return StepCounts()
        known_batches, counts = self.last_counts
        if micro_batches == known_batches:  # rows of a fixed length are all alike
            return counts
        try:
            counts = add_up(micro_batches, self.facts)
        except Exception as error:
            if not self.miscounted:
                self.miscounted = True
                self.drop("counting", error)
            return StepCounts()
        self.last_counts = (micro_batches, counts)
        return counts

    def take(self, times: StepTimes, payload: object) -> None:
        """A step is finished (some steps later). The sink of `step`."""
        counts = self.counts_of(payload)
        flops = counts.flops
        record = step_record(
            self.facts,
            times,
            samples=counts.samples,
            tokens=counts.tokens,
            padded_tokens=counts.padded_tokens,
            squared_lengths=counts.squared_lengths,
            model_flops=None if flops is None else flops.model,
            hardware_flops=None if flops is None else flops.hardware,
        )
        self.write(record)
        if not record.warmup:
            self.window.add(record)
        if (times.index + 1) % self.log_every == 0:
            self.report(record)

    def report(self, last: StepRecord) -> None:
        """Close the window that ends with `last`: memory, slow rank, logger, terminal."""
        memory = self.memory()
        self.look_for_slow_rank(last)
        finished, self.window = self.window, Totals()
        self.total.merge(finished)
        self.write(self.window_record(last.step, memory))
        if finished.num_steps == 0 or (self.log_metrics is None and self.print_line is None):
            return
        summary = summarise(finished, self.facts)
        window = Window(step=last.step, summary=summary, memory=memory, slow_rank=self.slow_rank)
        if self.log_metrics is not None:
            try:
                self.log_metrics(metrics(window), last.step)
            except Exception as error:
                self.log_metrics = None
                self.drop("the metrics logger", error)
        if self.print_line is not None:
            try:
                self.print_line(terminal_line(window))
            except Exception as error:
                self.print_line = None
                self.drop("the terminal line", error)

    def memory(self, *, proportional: bool = False) -> MemoryUse:
        """The window's peaks; begins a new window."""
        device: DeviceMemory | None = None
        reason: str | None = "no device memory to read: the host computes"
        if self.read_device_memory is not None:
            try:
                device, reason = self.read_device_memory(), None
            except Exception as error:
                self.read_device_memory = None
                reason = self.drop("reading device memory", error)
        use = MemoryUse(host=self.host_memory.read(proportional=proportional), device=device, reason=reason)
        self.peaks.add(use)
        return use

    def look_for_slow_rank(self, last: StepRecord) -> None:
        """Send this window's sums; judge whatever windows of all ranks have arrived meanwhile."""
        if self.gather is None:
            return
        try:
            self.gather.submit(rank_window(self.facts.rank, last.step, self.window).row())
            for rows in self.gather.ready():
                self.slow_rank = self.watch.judge([RankWindow.from_row(row) for row in rows])
        except Exception as error:
            self.gather, self.slow_rank = None, None
            self.drop("watching for the slow rank", error)

    def window_record(self, step: int, memory: MemoryUse) -> WindowRecord:
        """The line of a window that ends with `step`."""
        facts = self.facts
        return WindowRecord(run=facts.run, rank=facts.rank, step=step, memory=memory, slow_rank=self.slow_rank)

    def write(self, line: StepRecord | WindowRecord) -> None:
        """Append to the records; a window's line also hands everything to the system."""
        if self.writer is None:
            return
        try:
            self.writer.write(line)
            if isinstance(line, WindowRecord):
                self.writer.flush()
        except Exception as error:
            self.writer = None
            self.drop("writing records", error)

    def save(self) -> None:
        """Write the steps that have ended, without waiting for a device: for a process that leaves without `close`."""
        try:
            self.step.deliver_ended()
            if self.writer is not None:
                self.writer.flush()
        except Exception as error:
            self.drop("writing records", error)

    def close(self) -> str:
        """Take the steps the device still owes (waits for it), end the records, return the summary as text.

        Calling it again returns the same text. Never raises.
        """
        if self.closed is None:
            self.step.close()
            self.total.merge(self.window)
            self.window = Totals()
            if self.step.index:
                self.write(self.window_record(self.step.index - 1, self.memory(proportional=True)))
            own = [self.host_memory.close] if self.writer is None else [self.host_memory.close, self.writer.close]
            for undo in (*self.at_close, *own):
                try:
                    undo()
                except Exception as error:
                    self.drop("cleaning up", error)
            self.closed = summarise(self.total, self.facts)
        return summary_text(
            self.closed, self.peaks, memory_estimate(self.facts, self.last_counts[1].micro_batch_samples)
        )

    def summary(self) -> Summary:
        """The figures of all steps so far that count."""
        if self.closed is not None:
            return self.closed
        self.save()
        so_far = Totals()
        so_far.merge(self.total)
        so_far.merge(self.window)
        return summarise(so_far, self.facts)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def drop(self, what: str, error: Exception) -> str:
        """Say once that a part of the measuring is gone; returns the reason."""
        reason = f"{what} failed: {type(error).__name__}: {error}"
        log.warning("%s; training and the rest of the measuring go on", reason, exc_info=error)
        return reason


def memory_estimate(facts: RunFacts, micro_batch_size: int) -> MemoryEstimate | None:
    """The formulas' figure for this run; None when the model, its length or the micro batch is not known."""
    if facts.shape is None or facts.sequence_length is None or micro_batch_size < 1:
        return None
    if facts.shape.moe_layers and not facts.shape.experts:
        return None
    return estimate_memory(
        facts.shape,
        sequence_length=facts.sequence_length,
        micro_batch_size=micro_batch_size,
        recompute=facts.recompute,
        tensor_parallel_size=facts.tensor_parallel_size,
        pipeline_parallel_size=facts.pipeline_parallel_size,
        data_parallel_size=facts.data_parallel_size,
    )


def rank_window(rank: int, window: int, totals: Totals) -> RankWindow:
    """The sums of a window that the other ranks need to find out who is slow, in seconds."""
    phases = {name: totals.phase_ns(name) for name in totals.phases_ns}
    waits, data, host = (phases[name] for name in ("communication", "data", "scheduling"))
    if host is None:
        host = phases["other"]
    work = totals.model_flops if totals.model_flops is not None else totals.squared_lengths
    return RankWindow(
        rank=rank,
        window=window,
        step_s=totals.step_ns / 1e9,
        wait_s=None if waits is None else waits / 1e9,
        data_s=None if data is None else data / 1e9,
        computing_s=computing_s(phases),
        host_s=None if host is None else host / 1e9,
        work=None if work is None else float(work),
    )
