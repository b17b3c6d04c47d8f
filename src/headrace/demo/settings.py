"""What the user decides about a demo run, and how long each part of it is. Plain data: no torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.errors import ConfigError

ModelKind: TypeAlias = Literal["llama", "moe"]

WARMUP_STEPS = 3
"""The first steps allocate and compile; they are run and not counted."""
LOSS_STEPS = 8
"""Steps of each training that is compared bit by bit."""
BLOCK_ROUNDS = 8
"""Blocks per feed. A 95 % interval needs at least 6 (headrace.measure.statistics.MIN_BLOCKS)."""
TRACED_STEPS = 6
PROFILER_WARMUP_STEPS = 1
"""The profiler's own start is slow; this step is run under it and not written."""
MAX_TP = 128
"""As many readers as one ring has (headrace._native.MAX_READERS)."""
MAX_SAMPLES = 1_000_000
"""Every rank makes the order of all samples at once: some 90 bytes each with documents of 500 tokens, more with shorter
ones. At a second per step this is 8 days."""
MAX_SEED = 2**32 - 1
"""numpy.random.RandomState takes no larger one."""
MAX_SLOW_MS = 60_000.0
"""In each of the traced steps: the other ranks must not take the late one for dead (worker.COLLECTIVE_TIMEOUT)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """The defaults keep a run under four minutes on two cores and the broadcast's cost visible."""

    tp: int = 2
    """Ranks: one tensor-parallel group on this machine."""
    steps: int = 32
    """Steps in which every feed delivers. The blocks together are a little longer."""
    seq_length: int = 2048
    micro_batch_size: int = 1
    model: ModelKind = "llama"
    seed: int = 1234
    trace_dir: str | None = None
    """Also write one profiler trace per rank into this folder."""
    slow_rank: int | None = None
    """This rank sleeps `slow_ms` in each traced step, and only there."""
    slow_ms: float = 200.0
    """A fifth of a step of the default model on two cores; `headrace analyze` names delays from 3 % of a step on."""

    def __post_init__(self) -> None:
        for name in ("tp", "steps", "seq_length", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.tp > MAX_TP:
            raise ConfigError(f"tp must be at most {MAX_TP}, got {self.tp:,}")
        if (samples := self.num_batches * self.micro_batch_size) > MAX_SAMPLES:
            raise ConfigError(
                f"{self.steps:,} steps of micro batch size {self.micro_batch_size:,} need {samples:,} samples, at most "
                f"{MAX_SAMPLES:,} are kept in order; lower steps or micro_batch_size"
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"seed must lie in [0, {MAX_SEED}], got {self.seed}")
        if self.model not in ("llama", "moe"):
            raise ConfigError(f"model must be llama or moe, got {self.model!r}")
        if not math.isfinite(self.slow_ms) or self.slow_ms <= 0:
            raise ConfigError(f"slow_ms must be a positive number, got {self.slow_ms:g}")
        if self.slow_ms > MAX_SLOW_MS:
            raise ConfigError(f"slow_ms must be at most {MAX_SLOW_MS:g}, got {self.slow_ms:g}")
        if self.slow_rank is not None and self.trace_dir is None:
            raise ConfigError("a slow rank is planted in traced steps only: name a folder with --trace as well")
        if self.slow_rank is not None and not 0 <= self.slow_rank < self.tp:
            raise ConfigError(f"slow_rank must be one of the {self.tp} ranks 0 to {self.tp - 1}, got {self.slow_rank}")

    @property
    def block_steps(self) -> int:
        """Steps of one block."""
        return max(1, self.steps // 16)

    @property
    def loss_steps(self) -> int:
        return min(LOSS_STEPS, self.steps)

    @property
    def num_batches(self) -> int:
        """Batches that each feed must be able to deliver in one go."""
        return WARMUP_STEPS + self.steps + BLOCK_ROUNDS * self.block_steps + self.num_traced_steps

    @property
    def num_traced_steps(self) -> int:
        """Steps under the profiler, the one that is not written included."""
        return 0 if self.trace_dir is None else PROFILER_WARMUP_STEPS + TRACED_STEPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The token store that a run reads."""

    prefix: str
    documents: int
    tokens: int
    vocab_size: int
    eod: int | None
    """The id that ends documents, None where the store does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkOrder:
    """What the ranks are told, through a file in the run's folder."""

    settings: DemoSettings
    corpus: Corpus
