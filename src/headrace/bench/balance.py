"""What balanced steps save, from document lengths alone. The measuring body of `headrace bench balance`.

Two texts: the corpus (the demo's, a given one, or synthetic), and documents with a longer tail than web text. Per text
and row length the same steps twice, as stored and dealt out (headrace.order.balance), and for each step:

    spread     most expensive data rank over the mean: the step's time, as a multiple of a perfect one, where ranks
               meet at its end (data parallel)
    in turns   the same where they meet in every turn (pipeline parallel, parameters gathered per micro batch)
    bound      what no dealing of these samples can go below, because of single ones

Isolates: who waits for whom because of document lengths. Held fixed: samples and order; the cost of a row is tokens +
sum of s^2 / (12 * hidden size). How it can mislead: it is arithmetic, not a training run: communication, kernels that
reach other speeds at other lengths, and everything else that makes ranks differ are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from headrace.bench.corpus import choose_corpus
from headrace.bench.figure import Figure, as_records
from headrace.bench.pack import SYNTHETIC_MEDIAN_TOKENS
from headrace.errors import ConfigError
from headrace.measure.environment import capture_environment
from headrace.measure.statistics import median
from headrace.order import (
    EpochOrder,
    OrderRules,
    StepShape,
    cost_of,
    deal,
    laid_out_lengths,
    lowest_slowest_rank,
    step_cost,
)
from headrace.order.plan import IntArray
from headrace.store import TokenStore

RECORD_VERSION = 1
ISOLATES = "document lengths to the cost of each rank: arithmetic, no training"

SEQ_LENGTHS = (8192, 32768)
TARGET = 1.05
LONG_TAIL_SIGMA = 2.0
"""Of the lognormal lengths of the second text: 2 % of its documents hold half of its tokens."""
LONG_TAIL_DOCUMENTS = 20_000


def run(
    corpus_prefix: str | None = None,
    *,
    seq_lengths: Sequence[int] = SEQ_LENGTHS,
    shape: StepShape,
    hidden_size: int = 4096,
    num_steps: int = 24,
    seed: int = 1234,
) -> dict[str, Any]:
    """`num_steps` steps of each text and row length, as stored and balanced; the record is JSON-able.

    Each row holds one dealing's values per step, its median and its worst; `summary` the figure to reach, over the
    steps that no single sample keeps from it, and how many those are. ConfigError for sizes that mean nothing.
    """
    if num_steps < 1 or hidden_size < 1 or not seq_lengths or min(shape.num_samples, *seq_lengths) < 1:
        raise ConfigError(
            f"steps, hidden size, sequence lengths and the sizes of a step must be at least 1, got {num_steps}, "
            f"{hidden_size}, {list(seq_lengths)} and {asdict(shape)}"
        )
    with choose_corpus(corpus_prefix, seed=seed) as corpus:
        with TokenStore(corpus.prefix) as store:
            texts = {corpus.origin: store.lengths}
        described = asdict(corpus)
    texts["long-tailed"] = long_tailed_lengths(seed)
    rows: list[dict[str, Any]] = []
    for text, lengths in texts.items():
        for seq_length in seq_lengths:
            costs = _costs(lengths, seq_length, shape, num_steps, hidden_size, seed)
            rows += [
                {
                    "text": text,
                    "seq_length": seq_length,
                    **asdict(shape),
                    **row,
                }
                for row in _dealings(costs, shape)
            ]
    return {
        "version": RECORD_VERSION,
        "isolates": ISOLATES,
        "environment": asdict(capture_environment()),
        "corpus": described,
        "hidden_size": hidden_size,
        "rows": rows,
        "skipped": {},
        "summary": _summarise(rows),
    }


def long_tailed_lengths(seed: int) -> IntArray:
    """int32 [20000] document lengths with the median of web text and a longer tail."""
    random = np.random.default_rng(seed)
    drawn = random.lognormal(np.log(SYNTHETIC_MEDIAN_TOKENS["synthetic"]), LONG_TAIL_SIGMA, LONG_TAIL_DOCUMENTS)
    return np.maximum(1, drawn).astype(np.int32)


def _costs(
    lengths: IntArray, seq_length: int, shape: StepShape, num_steps: int, hidden_size: int, seed: int
) -> list[list[int]]:
    """What each sample of each step costs; the corpus again as often as it takes."""
    rules = OrderRules(sequence_length=seq_length, seed=seed)
    per_epoch = EpochOrder(lengths, rules, num_epochs=1).samples_per_epoch
    order = EpochOrder(lengths, rules, num_epochs=-(-num_steps * shape.num_samples // per_epoch))
    return [
        [
            cost_of(
                laid_out_lengths(order.parts(sample), sequence_length=seq_length, extra=rules.extra),
                1 / (12 * hidden_size),
            )
            for sample in range(step * shape.num_samples, (step + 1) * shape.num_samples)
        ]
        for step in range(num_steps)
    ]


def _dealings(costs: Sequence[Sequence[int]], shape: StepShape) -> list[dict[str, Any]]:
    """One row as stored, one balanced."""
    rows = []
    for name in ("stored", "balanced"):
        spreads, in_turns, bounds = [], [], []
        for one in costs:
            order = deal(one, shape) if name == "balanced" else range(shape.num_samples)
            cost = step_cost(one, order, shape)
            spreads.append(cost.spread)
            in_turns.append(cost.slowest_turns / cost.mean_rank)
            bounds.append(max(1.0, lowest_slowest_rank(one, shape) / cost.mean_rank))
        rows.append(
            {
                "dealing": name,
                "median_spread": median(spreads),
                "worst_spread": max(spreads),
                "median_in_turns": median(in_turns),
                "worst_bound": max(bounds),
                "spreads": spreads,
                "in_turns": in_turns,
                "bounds": bounds,
            }
        )
    return rows


def _summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    balanced = [row for row in rows if row["dealing"] == "balanced"]
    free = [
        spread
        for row in balanced
        for spread, bound in zip(row["spreads"], row["bounds"], strict=True)
        if bound <= TARGET
    ]
    figure = Figure(
        what="max / mean cost over data ranks, where no single sample prevents it",
        target=TARGET,
        reached_by="at most",
        value=max(free, default=None),
    )
    return {
        "figures": as_records([figure]),
        "num_steps": sum(len(row["spreads"]) for row in balanced),
        "num_steps_prevented": sum(bound > TARGET for row in balanced for bound in row["bounds"]),
        "worst_over_bound": max(
            spread / bound for row in balanced for spread, bound in zip(row["spreads"], row["bounds"], strict=True)
        ),
    }
