"""The part of a batch that one rank takes. Ranks of one TP x CP x PP replica share a slot; each names its own view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from headrace.arguments import whole_number
from headrace.errors import ConfigError
from headrace.packing.context_parallel import Cut, check_rank
from headrace.packing.prediction import BoundaryRule
from headrace.packing.stages import Schedule, Stage, keys_of_stages


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Which tokens and which fields a rank takes. The default takes everything as it lies, without a copy."""

    cp_rank: int = 0
    cp_size: int = 1
    """Ranks among which the tokens are divided."""
    cut: Cut = "documents"
    """How: see headrace.packing.context_parallel. Only "contiguous" needs no copy."""
    ulysses_size: int = 1
    """For cut="hybrid": ranks that exchange heads; cp_size / ulysses_size ranks form the ring."""
    stage: Stage | tuple[Stage, ...] = "only"
    """The pipeline stage, or those of all virtual stages that this process holds."""
    schedule: Schedule = "1f1b"
    mtp_depth: int = 0
    """Prediction depths for which this rank wants fields of their own: `mtp_tokens` and so on, [mtp_depth, B, S]."""
    mtp_boundaries: BoundaryRule = "kept"
    """Megatron-LM's rule, or MindSpeed-LLM's: see headrace.packing.prediction."""
    also: tuple[str, ...] = ()
    """Fields wanted beyond those of the stage, by Megatron's names: ("position_ids",) for middle stages whose rotary
    embedding takes global positions, as MindSpeed-LLM's does."""

    def __post_init__(self) -> None:
        for name in ("cp_rank", "cp_size", "ulysses_size", "mtp_depth"):
            whole_number(name, getattr(self, name))
        check_rank(self.cp_size, self.cp_rank)
        if self.cut not in get_args(Cut) or self.mtp_boundaries not in get_args(BoundaryRule):
            raise ConfigError(
                f"cut must be one of {', '.join(get_args(Cut))} and mtp_boundaries one of "
                f"{', '.join(get_args(BoundaryRule))}, got {self.cut!r} and {self.mtp_boundaries!r}"
            )
        if self.ulysses_size < 1 or self.cp_size % self.ulysses_size:
            raise ConfigError(f"ulysses_size must divide cp_size {self.cp_size}, got {self.ulysses_size}")
        if self.ulysses_size > 1 and self.cut != "hybrid":
            raise ConfigError(f"ulysses_size {self.ulysses_size} needs cut='hybrid', got cut={self.cut!r}")
        if self.mtp_depth < 0:
            raise ConfigError(f"mtp_depth must be at least 0, got {self.mtp_depth}")
        if self.mtp_boundaries == "moved" and self.cp_size > 1:
            raise ConfigError(
                f"mtp_boundaries='moved' has no rule for a row that is cut: cp_size must be 1, got {self.cp_size}"
            )
        keys_of_stages(self.stages, schedule=self.schedule)  # refuses unknown names

    @property
    def stages(self) -> tuple[Stage, ...]:
        """`stage` as a tuple."""
        return self.stage if isinstance(self.stage, tuple) else (self.stage,)

    @property
    def keys(self) -> frozenset[str]:
        """Megatron's names of the fields this view hands out, as far as the batch has them."""
        stages: tuple[Stage, ...] = ("mtp",) if self.mtp_depth else self.stages
        return keys_of_stages(stages, schedule=self.schedule) | set(self.also)

    @property
    def takes_everything(self) -> bool:
        """Whether the batch is handed out as it lies."""
        return self.cp_size == 1 and self.mtp_depth == 0 and self.keys >= keys_of_stages(("only",))

    @property
    def shared_terms(self) -> str:
        """What all ranks of a feed must agree on, or the parts would not add up to the batch."""
        return f"cp_size {self.cp_size}, cut {self.cut}, ulysses_size {self.ulysses_size}"
