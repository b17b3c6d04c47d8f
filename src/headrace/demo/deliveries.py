"""Every step all feeds deliver the same batch: timed apart, counted, and compared byte for byte.

Isolates: from "every rank is ready" to "this rank has its batch". Held fixed: the samples, the machine, the minute; the
order rotates from step to step, and a whole training step passes before a feed is asked again, so all can prefetch.
How it can mislead: three feeds prefetch beside one training here, where a real job has one.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from headrace.demo.feeds import ARRAYS, Batch, OpenFeed, longest_document, same_bytes
from headrace.demo.model import Training
from headrace.demo.processes import bytes_read, cpu_ns
from headrace.demo.progress import Progress
from headrace.demo.results import CONTENDERS, Deliveries
from headrace.measure.step import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class _Usage:
    """Counters of one feed's processes."""

    cpu_ns: int
    bytes_read: int | None

    @classmethod
    def of(cls, feed: OpenFeed) -> _Usage:
        return cls(cpu_ns=cpu_ns(feed.pids), bytes_read=bytes_read(feed.pids))


def deliver_from_all(
    feeds: Sequence[OpenFeed],
    training: Training,
    *,
    num_steps: int,
    num_warmup_steps: int,
    device: torch.device,
    progress: Progress,
) -> Deliveries:
    """`num_steps` counted steps after the warm-up. Blocks; what the feeds raise."""
    get_batch_ns: dict[str, list[int]] = {name: [] for name in CONTENDERS}
    own_cpu_ns = dict.fromkeys(CONTENDERS, 0)
    digest, phases, all_same = hashlib.sha256(), Step(), True
    started: dict[str, _Usage] = {}
    for step in range(-num_warmup_steps, num_steps):
        if step == 0:
            started = {feed.name: _Usage.of(feed) for feed in feeds}
        batches: dict[str, Batch] = {}
        first = step % len(feeds)
        for feed in (*feeds[first:], *feeds[:first]):
            dist.barrier()
            cpu_before, before = time.process_time_ns(), time.perf_counter_ns()
            batches[feed.name] = feed.next()
            settle(device)
            after, cpu_after = time.perf_counter_ns(), time.process_time_ns()
            if step >= 0:
                get_batch_ns[feed.name].append(after - before)
                own_cpu_ns[feed.name] += cpu_after - cpu_before
        reference = batches["broadcast"]
        all_same &= all(same_bytes(reference, batch) for batch in batches.values())
        _add_to(digest, batches["headrace"])
        training.step(batches["headrace"], phases)
        progress.advance("every feed delivers every batch")
    ended = {feed.name: _Usage.of(feed) for feed in feeds}
    return Deliveries(
        get_batch_ns=get_batch_ns,
        cpu_ns={name: own_cpu_ns[name] + ended[name].cpu_ns - started[name].cpu_ns for name in CONTENDERS},
        bytes_read={name: _difference(ended[name].bytes_read, started[name].bytes_read) for name in CONTENDERS},
        all_same=all_same,
        digest=digest.hexdigest(),
    )


def settle(device: torch.device) -> None:
    """A batch is there when the device has it; on a CPU nothing is under way."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _add_to(digest: hashlib._Hash, batch: Batch) -> None:
    for name in ARRAYS:
        digest.update(batch[name].cpu().numpy().tobytes())
    digest.update(longest_document(batch).to_bytes(8, "little"))


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
