"""One rank with a real feed, for `headrace bench handover`: `python -m headrace.bench.handover_feed CHARGE`.

Prints one line of JSON (FeedTimes).
"""

from __future__ import annotations

import os
import sys
import time

import msgspec
import torch

from headrace.bench import process_cost
from headrace.bench.handover_charges import FeedCharge, FeedTimes
from headrace.bench.handover_reader import clock, cpu_s
from headrace.bench.pausing_source import PausingSource
from headrace.feed.packed_tokens import PackedTokens
from headrace.torch import Feed


def main() -> None:
    charge = msgspec.json.decode(sys.argv[1], type=FeedCharge)
    torch.set_num_threads(1)
    next_hot, hot, next_after_gap, after_gap = [], [], [], []
    with Feed(PackedTokens(**charge.source), num_slots=charge.num_slots) as feed:
        others = process_cost.descendants(os.getpid())
        for _ in range(2 * charge.num_slots):
            next(feed)
        for _ in range(charge.num_bursts):
            fill(feed, charge.num_slots - 1)
            for _ in range(charge.num_slots // 2):
                took_next, took = timed(feed)
                next_hot.append(took_next)
                hot.append(took)
        for _ in range(charge.num_after_gap):
            time.sleep(charge.gap_s)
            took_next, took = timed(feed)
            next_after_gap.append(took_next)
            after_gap.append(took)
        feeder_cpu, rank_cpu = paced_cpu(feed, others, charge)
    idle_cpu_s, idle_wall_s = idle(charge.idle_s)
    ticks_cpu_s, ticks_wall_s = bare_ticks(charge.idle_s)
    result = FeedTimes(
        next_hot_ns=next_hot,
        hot_ns=hot,
        next_after_gap_ns=next_after_gap,
        after_gap_ns=after_gap,
        feeder_cpu=feeder_cpu,
        rank_cpu=rank_cpu,
        idle_cpu_fraction=idle_cpu_s / idle_wall_s,
        idle_wall_s=idle_wall_s,
        bare_ticks_cpu_fraction=ticks_cpu_s / ticks_wall_s,
    )
    print(msgspec.json.encode(result).decode())


def fill(feed: Feed, num_ahead: int) -> None:
    """Blocks until so many batches are ready."""
    while feed.stats().ahead < num_ahead:
        time.sleep(0.001)


def timed(feed: Feed) -> tuple[int, int]:
    """Nanoseconds of next() alone, and with its fields looked at."""
    start = clock()
    batch = next(feed)
    taken = clock()
    _ = (
        batch["tokens"],
        batch["labels"],
        batch["loss_mask"],
        batch["position_ids"],
        batch["cu_seqlens"],
        batch.max_seqlen,
    )
    return taken - start, clock() - start


def paced_cpu(feed: Feed, others: set[int], charge: FeedCharge) -> tuple[float, float]:
    """Cores that the feeder and this rank use while a batch is taken every gap_s."""
    start, feeder_s, rank_s = time.monotonic(), sum(map(process_cost.cpu_s, others)), cpu_s()
    while time.monotonic() - start < charge.paced_s:
        time.sleep(charge.gap_s)
        next(feed)
    wall_s = time.monotonic() - start
    return (sum(map(process_cost.cpu_s, others)) - feeder_s) / wall_s, (cpu_s() - rank_s) / wall_s


def idle(pause_s: float) -> tuple[float, float]:
    """CPU and wall seconds of a rank inside one long next(). Settles first: imports and first calls are over."""
    with Feed(PausingSource(pause_s)) as feed:
        next(feed)
        before, start = cpu_s(), time.monotonic()
        next(feed)
        return cpu_s() - before, time.monotonic() - start


def bare_ticks(pause_s: float) -> tuple[float, float]:
    """CPU and wall seconds of sleeping in ticks of 100 ms: what a waiting rank cannot be cheaper than."""
    before, start = cpu_s(), time.monotonic()
    while time.monotonic() - start < pause_s:
        time.sleep(0.1)
    return cpu_s() - before, time.monotonic() - start


if __name__ == "__main__":
    main()
