"""Short trainings from the same weights over the same samples, one per feed: are the losses the same, bit by bit?

Each feed is alone in the job meanwhile, so what is freed when it closes is the memory it held.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from headrace.demo.feeds import OpenFeed
from headrace.demo.model import Training
from headrace.demo.processes import descendants, resident_bytes, wait_until_gone
from headrace.demo.progress import Progress
from headrace.demo.results import CONTENDERS, Losses
from headrace.errors import HeadraceError
from headrace.feed.packed_tokens import PackedTokens
from headrace.measure.step import Step

CLOSE_TIMEOUT_S = 20.0


def train_on_each(
    source: PackedTokens, model_folder: Path, *, num_steps: int, device: torch.device, progress: Progress
) -> Losses:
    """`num_steps` steps per feed, each training begun anew. Blocks; what the feeds raise."""
    _load_everything_once(source, model_folder, device)
    by_feed: dict[str, list[float]] = {}
    freed: dict[str, int | None] = {}
    for name in CONTENDERS:
        # Each feed begins beside a job of the same size: a worker inherits what its rank holds when it is forked.
        _give_memory_back()
        training, phases = Training(model_folder), Step()
        feed = OpenFeed(name, source, device)
        by_feed[name] = []
        for _ in range(num_steps):
            by_feed[name].append(float(training.step(feed.next(), phases)))
            progress.advance(f"train from one seed, fed by {name}")
        freed[name] = _close_and_weigh(feed)
        del training
    return Losses(by_feed=by_feed, resident_bytes=freed)


def _load_everything_once(source: PackedTokens, model_folder: Path, device: torch.device) -> None:
    """What torch and transformers only load in a first step must not count for or against the first feed."""
    batches = source.open_batches()
    first = {
        name: torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
        for name, value in batches[0].items()
    }
    Training(model_folder).step(first, Step())
    batches.close()


def _give_memory_back() -> None:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)


def _close_and_weigh(feed: OpenFeed) -> int | None:
    """Bytes that this rank and the processes below it hold less after the feed is closed.

    A worker that was forked keeps the pages that its rank has overwritten since: only what comes back when it ends says
    what it cost. All ranks are weighed before any of them closes, since they share pages.
    """
    _give_memory_back()
    dist.barrier()
    before = _resident_here()
    dist.barrier()
    feed.close()
    _give_memory_back()
    if alive := wait_until_gone(feed.pids, timeout_s=CLOSE_TIMEOUT_S):
        raise HeadraceError(f"processes {alive} of the feed {feed.name} have not ended {CLOSE_TIMEOUT_S:g} s after it")
    dist.barrier()
    after = _resident_here()
    return None if before is None or after is None else before - after


def _resident_here() -> int | None:
    return resident_bytes({os.getpid()} | descendants(os.getpid()))
