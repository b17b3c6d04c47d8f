"""Samples and tokens per second: the first number to look at.

    samples/s = samples per data-parallel rank and optimizer step x data-parallel size / step time
    tokens/s  = tokens over all data-parallel ranks / step time

Over a window both are a sum over a sum: a mean of per-step rates would let short steps count as much as long ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.measure.sense import above_zero, whole_at_least

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """What one optimizer step held on one rank: all its micro batches together (gradient accumulation included).

    `tokens` are real ones, `padded_tokens` those the model computed on. None: not counted. `seconds` is the step's
    time without evaluation and checkpoints, None when it could not be measured. Raises ConfigError for a count that is
    not a whole number of 0 or more.
    """

    seconds: float | None
    samples: int | None = None
    tokens: int | None = None
    padded_tokens: int | None = None

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("samples", "tokens", "padded_tokens")}
        whole_at_least(0, **{name: count for name, count in counts.items() if count is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Rates of the whole job over a window. None with a reason, never inf and never 0 for "unknown"."""

    num_steps: int
    """Steps that were timed and went into the window."""
    seconds: float
    samples_per_s: float | None
    tokens_per_s: float | None
    padded_tokens_per_s: float | None
    samples_per_s_per_device: float | None
    tokens_per_s_per_device: float | None
    tokens_per_day: float | None
    padding_ratio: float | None
    """Share of the computed tokens that were padding, 0..1. None where `padded_tokens` was not given, or is less than
    the real tokens."""
    reason: str | None = None


def samples_per_second(batch_size: int, data_parallel_size: int, step_seconds: float) -> float | None:
    """BS x N / step time; BS counts one optimizer step (micro batch x accumulation). None for a time not above zero.

    Raises ConfigError for sizes that are not whole numbers of at least 0 and 1.
    """
    whole_at_least(0, batch_size=batch_size)
    whole_at_least(1, data_parallel_size=data_parallel_size)
    if not above_zero(step_seconds):
        return None
    return batch_size * data_parallel_size / step_seconds


def throughput(
    steps: Iterable[StepWork], *, data_parallel_size: int = 1, num_devices: int = 1, warmup_steps: int = 0
) -> Throughput:
    """Rates over `steps` of one rank, scaled to `data_parallel_size` ranks that do as much, after the warm-up.

    `num_devices` counts all devices of the job (data x tensor x pipeline x context), because a token is only trained
    when all of them have worked on it. Steps without a time or with a time of zero or less are left out.
    Raises ConfigError for sizes below one.
    """
    whole_at_least(1, data_parallel_size=data_parallel_size, num_devices=num_devices)
    whole_at_least(0, warmup_steps=warmup_steps)
    window = list(steps)[warmup_steps:]
    timed = [step for step in window if step.seconds is not None and above_zero(step.seconds)]
    result = rates(
        num_steps=len(timed),
        seconds=math.fsum(step.seconds for step in timed if step.seconds is not None),
        samples=total([step.samples for step in timed]),
        tokens=total([step.tokens for step in timed]),
        padded_tokens=total([step.padded_tokens for step in timed]),
        data_parallel_size=data_parallel_size,
        num_devices=num_devices,
    )
    # The share of padding needs no times: steps without one still count.
    tokens, padded_tokens = (total([getattr(step, name) for step in window]) for name in ("tokens", "padded_tokens"))
    return replace(result, padding_ratio=padding_ratio(tokens, padded_tokens))


def rates(
    *,
    num_steps: int,
    seconds: float,
    samples: int | None,
    tokens: int | None,
    padded_tokens: int | None,
    data_parallel_size: int,
    num_devices: int,
) -> Throughput:
    """Rates of the job from one rank's sums over `num_steps` timed steps, which took `seconds` together."""
    scale = data_parallel_size / seconds if above_zero(seconds) else None
    uncounted = [name for name, count in (("samples", samples), ("tokens", tokens)) if count is None]
    reason = f"not counted on every step: {', '.join(uncounted)}" if uncounted else None
    samples_per_s, tokens_per_s = times(samples, scale), times(tokens, scale)
    return Throughput(
        num_steps=num_steps,
        seconds=seconds,
        samples_per_s=samples_per_s,
        tokens_per_s=tokens_per_s,
        padded_tokens_per_s=times(padded_tokens, scale),
        samples_per_s_per_device=times(samples_per_s, 1 / num_devices),
        tokens_per_s_per_device=times(tokens_per_s, 1 / num_devices),
        tokens_per_day=times(tokens_per_s, SECONDS_PER_DAY),
        padding_ratio=padding_ratio(tokens, padded_tokens),
        reason=reason if scale is not None else "no step that counts has a time above 0",
    )


def padding_ratio(tokens: int | None, padded_tokens: int | None) -> float | None:
    """1 - real / computed tokens. None where either was not counted, or fewer were computed than were real."""
    if tokens is None or not padded_tokens or tokens > padded_tokens:
        return None
    return 1.0 - tokens / padded_tokens


def total(counts: list[int | None]) -> int | None:
    """The sum, or None when nothing or not everything was counted."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def times(value: float | None, factor: float | None) -> float | None:
    """value x factor where both are known."""
    return None if value is None or factor is None else value * factor
