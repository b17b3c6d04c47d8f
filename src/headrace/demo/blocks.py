"""Blocks of steps that use one feed only, in turn: what a step costs with each, and the throughput it allows.

A block of one feed lies beside a block of the next one, again and again, so that a slow minute of the machine falls on
all of them; see headrace.measure.statistics.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from headrace.demo.deliveries import settle
from headrace.demo.feeds import OpenFeed
from headrace.demo.model import Training
from headrace.demo.progress import Progress
from headrace.demo.results import CONTENDERS, Blocks
from headrace.measure.phases import StepTimes
from headrace.measure.step import Step
from headrace.torch.measure import backend_of


def alternate(
    feeds: Sequence[OpenFeed],
    training: Training,
    *,
    num_rounds: int,
    num_steps: int,
    device: torch.device,
    progress: Progress,
) -> Blocks:
    """`num_rounds` blocks of `num_steps` steps per feed, the order rotating. Blocks; what the feeds raise."""
    block_ns: dict[str, list[int]] = {name: [] for name in CONTENDERS}
    times: dict[str, list[StepTimes]] = {name: [] for name in CONTENDERS}
    steps = {name: _stopwatch(times[name], device) for name in CONTENDERS}
    for number in range(num_rounds):
        first = number % len(feeds)
        for feed in (*feeds[first:], *feeds[:first]):
            phases = steps[feed.name]
            dist.barrier()
            before = time.perf_counter_ns()
            phases.begin()
            for _ in range(num_steps):
                with phases.data:
                    batch = feed.next()
                training.step(batch, phases)
                phases.end()
            settle(device)
            block_ns[feed.name].append(time.perf_counter_ns() - before)
            for _ in range(num_steps):
                progress.advance("blocks of one feed each")
    for phases in steps.values():
        phases.close()
    return Blocks(
        block_ns=block_ns,
        phases_ns={name: _by_phase(times[name]) for name in CONTENDERS},
    )


def _stopwatch(times: list[StepTimes], device: torch.device) -> Step:
    backend = backend_of(device)
    return Step(
        new_event=backend.new_event if backend.asynchronous and backend.blind is None else None,
        blind=backend.blind,
        sink=lambda step_times, _: times.append(step_times),
    )


def _by_phase(times: Sequence[StepTimes]) -> dict[str, list[int]]:
    seen: dict[str, list[int]] = {}
    for one in times:
        for phase, phase_ns in one.phases_ns.items():
            if phase_ns is not None:
                seen.setdefault(phase, []).append(phase_ns)
    return seen
