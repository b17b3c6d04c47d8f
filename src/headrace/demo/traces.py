"""A profiler trace per rank of a few real steps, with a slow rank on request: food for `headrace analyze`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from headrace.demo.feeds import OpenFeed
from headrace.demo.model import Training
from headrace.demo.progress import Progress
from headrace.demo.settings import PROFILER_WARMUP_STEPS, TRACED_STEPS, DemoSettings


def write_trace(
    feed: OpenFeed, training: Training, settings: DemoSettings, *, device: torch.device, progress: Progress
) -> None:
    """Train TRACED_STEPS steps and write `rank<R>.pt.trace.json.gz` into the folder. Blocks; what the feed raises."""
    assert settings.trace_dir is not None
    rank = dist.get_rank()
    delay_s = settings.slow_ms / 1000 if rank == settings.slow_rank else 0.0
    target = Path(settings.trace_dir) / f"rank{rank}.pt.trace.json.gz"
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    ranges = _Ranges()
    dist.barrier()
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=PROFILER_WARMUP_STEPS, active=TRACED_STEPS, repeat=1),
        on_trace_ready=lambda finished: finished.export_chrome_trace(str(target)),
        record_shapes=True,
    ) as profiler:
        for _ in range(settings.num_traced_steps):
            with ranges.data:
                batch = feed.next()
            # A host that is late for unknown reasons leaves no name in a trace.
            time.sleep(delay_s)
            training.step(batch, ranges)
            profiler.step()
            progress.advance("write traces")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ranges:
    """The phases of a step as named ranges in the trace."""

    data: record_function = field(default_factory=lambda: record_function("data"))
    forward: record_function = field(default_factory=lambda: record_function("forward"))
    backward: record_function = field(default_factory=lambda: record_function("backward"))
    optimizer: record_function = field(default_factory=lambda: record_function("optimizer"))
