"""From the ranks' raw values to the JSON document, version 1. Nothing is filled in: what was not measured is null."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from headrace.demo.results import CONTENDERS, Losses, Measured
from headrace.demo.settings import BLOCK_ROUNDS, DemoSettings, WorkOrder
from headrace.measure.environment import capture_environment
from headrace.measure.phases import PHASES
from headrace.measure.statistics import median, p99, ratio_interval, verdict
from headrace.measure.throughput import StepWork, throughput

VERSION = 1


def document(order: WorkOrder, measured: Measured) -> dict[str, Any]:
    """Feeds side by side, headrace compared with the broadcast, the proofs of equality, and the conditions."""
    settings = order.settings
    feeds = {name: feed_figures(name, settings, measured) for name in CONTENDERS}
    ranks = measured.ranks
    compared = comparison(feeds)
    return {
        "version": VERSION,
        "tp": settings.tp,
        "steps": settings.steps,
        "model": settings.model,
        "parameters": measured.num_parameters,
        "corpus": {
            "documents": order.corpus.documents,
            "tokens": order.corpus.tokens,
            "vocab_size": order.corpus.vocab_size,
        },
        "seq_length": settings.seq_length,
        "micro_batch_size": settings.micro_batch_size,
        "seed": settings.seed,
        "feeds": feeds,
        **compared,
        "throughput_gain": throughput_gain(feeds, possible_gain=compared["possible_gain"], num_steps=settings.steps),
        "identical_batches": all(rank.deliveries.all_same for rank in ranks)
        and len({rank.deliveries.digest for rank in ranks}) == 1,
        "identical_losses": same_bits([rank.losses for rank in ranks]),
        "losses": ranks[0].losses.by_feed["headrace"],
        "environment": {
            **asdict(capture_environment()),
            "device": measured.device,
            "backend": measured.backend,
            "threads_per_rank": measured.num_threads,
        },
    }


def feed_figures(name: str, settings: DemoSettings, measured: Measured) -> dict[str, Any]:
    """One contender. Times are the slowest rank's of the group, step by step and block by block."""
    ranks = measured.ranks
    get_batch_ms = [ns / 1e6 for ns in _slowest([rank.deliveries.get_batch_ns[name] for rank in ranks])]
    block_s = [ns / 1e9 for ns in _slowest([rank.blocks.block_ns[name] for rank in ranks])]
    block_tokens = settings.block_steps * settings.micro_batch_size * settings.seq_length
    step_ms = [seconds * 1e3 / settings.block_steps for seconds in block_s]
    # All ranks of a tensor-parallel group train on the same tokens, so they count once.
    rates = throughput([StepWork(seconds=seconds, tokens=block_tokens) for seconds in block_s])
    resident = _sum([rank.losses.resident_bytes[name] for rank in ranks])
    return {
        "get_batch_ms": {"median": median(get_batch_ms), "p99": p99(get_batch_ms), "values": get_batch_ms},
        "step_ms": {"median": median(step_ms), "blocks": step_ms},
        "tokens_per_s": rates.tokens_per_s,
        "tokens_per_day": rates.tokens_per_day,
        "host_rss_mb": None if resident is None else resident / 1e6,
        "bytes_read": _sum([rank.deliveries.bytes_read[name] for rank in ranks]),
        "cpu_s": sum(rank.deliveries.cpu_ns[name] for rank in ranks) / 1e9,
        "phases_ms": {phase: _phase_ms(name, phase, measured) for phase in PHASES},
    }


def comparison(feeds: dict[str, Any]) -> dict[str, float | None]:
    """What the broadcast costs and how much of that headrace takes away, from medians."""
    broadcast, headrace = feeds["broadcast"], feeds["headrace"]
    get_batch_ms, step_ms = broadcast["get_batch_ms"]["median"], broadcast["step_ms"]["median"]
    reduction = 1.0 - headrace["get_batch_ms"]["median"] / get_batch_ms
    return {
        "get_batch_reduction": reduction,
        "get_batch_share": get_batch_ms / step_ms,
        # A get_batch that took as long as the step, timed apart, leaves nothing to divide by.
        "possible_gain": step_ms / (step_ms - get_batch_ms) - 1.0 if step_ms > get_batch_ms else None,
        "realised_share": reduction,
    }


def throughput_gain(feeds: dict[str, Any], *, possible_gain: float | None, num_steps: int) -> dict[str, Any]:
    """headrace against the broadcast over paired blocks: gain - 1, with the limits of its 95 % interval.

    An interval that lies above what a perfect feed could give speaks of the machine, not of the feed: no verdict then.
    A run of one step is for looking: neither interval nor verdict.
    """
    # Throughput is the inverse of time: the broadcast's over headrace's. Means of blocks, as tokens/s is a sum over a
    # sum.
    interval = ratio_interval(
        feeds["broadcast"]["step_ms"]["blocks"], feeds["headrace"]["step_ms"]["blocks"], statistic="mean"
    )
    less_one = [None if edge is None else edge - 1.0 for edge in (interval.estimate, interval.low, interval.high)]
    found, reason = verdict(interval, better="higher"), None
    low = less_one[1]
    if num_steps == 1:
        less_one[1:], found, reason = [None, None], "cannot tell", "one step"
    elif found == "better" and low is not None and possible_gain is not None and low > possible_gain:
        found, reason = "cannot tell", "more than a perfect feed could give: the machine changed between the blocks"
    return dict(zip(("value", "low", "high"), less_one, strict=True)) | {
        "verdict": found,
        "reason": reason,
        "level": interval.level,
        "blocks": BLOCK_ROUNDS,
    }


def same_bits(losses: list[Losses]) -> bool:
    """Whether every feed gave every rank the same losses."""
    seen = {tuple(loss.hex() for loss in one) for rank in losses for one in rank.by_feed.values()}
    return len(seen) == 1


def _slowest(per_rank: list[list[int]]) -> list[int]:
    return [max(of_one_step) for of_one_step in zip(*per_rank, strict=True)]


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _phase_ms(name: str, phase: str, measured: Measured) -> float | None:
    """Median over the steps of the blocks, of the rank where the phase took longest."""
    medians = [median(rank.blocks.phases_ns[name].get(phase, [])) for rank in measured.ranks]
    known = [value for value in medians if value is not None]
    return max(known) / 1e6 if len(known) == len(medians) else None
