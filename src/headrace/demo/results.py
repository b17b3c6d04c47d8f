"""What the ranks leave in the run's folder: raw values, or why there are none. Plain data: no torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

CONTENDERS = ("broadcast", "replicated", "headrace")

ORDER_FILE = "order.json"
RESULTS_FILE = "results.json"
FAILURE_FILES = "failure-{rank}.json"

PerStep: TypeAlias = list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Short trainings from one seed, one per feed."""

    by_feed: dict[str, list[float]]
    resident_bytes: dict[str, int | None]
    """Memory of this rank and its processes that was freed when the feed closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deliveries:
    """Steps in which every feed delivers. One entry per step where it is a list."""

    get_batch_ns: dict[str, PerStep]
    cpu_ns: dict[str, int]
    """Processor time of this rank inside get_batch, and of the feed's processes below it all the while."""
    bytes_read: dict[str, int | None]
    """By the feed's processes below this rank: rows of tokens, and messages between processes."""
    all_same: bool
    """In every step the feeds gave this rank the same bytes."""
    digest: str
    """Over all batches: the same on every rank, or ranks trained on different data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Blocks of steps that use one feed only."""

    block_ns: dict[str, list[int]]
    """Each block as a whole."""
    phases_ns: dict[str, dict[str, PerStep]]
    """Per feed and phase of headrace.measure.phases: each step. A phase that cannot be seen is absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResults:
    """One rank's share."""

    losses: Losses
    deliveries: Deliveries
    blocks: Blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The whole run."""

    ranks: list[RankResults]
    num_parameters: int
    device: str
    backend: str
    num_threads: int
    """Of each rank, for its computing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a rank ended early."""

    rank: int
    kind: str
    message: str
    traceback: str
    """Empty for an error that was foreseen."""
    at_ns: int
    """Wall clock: the first failure is the cause, the others are its consequences."""
