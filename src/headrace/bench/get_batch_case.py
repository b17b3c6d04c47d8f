"""One cell of `headrace bench get-batch`: what its ranks are told, and what they report. Plain data, JSON both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CONTENDERS = ("broadcast", "megatron", "replicated", "headrace", "iceoryx2")
"""In the order in which a rank makes them: iceoryx2's ports come after everything that forks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One group of ranks, one shape of batch; all contenders, all paces."""

    num_ranks: int
    source: dict[str, Any]
    """PackedTokens' arguments."""
    contenders: tuple[str, ...]
    paces_ms: tuple[float, ...]
    num_blocks: int
    steps_per_block: int
    lead_in_steps: int
    """At the start of each block: taken, kept apart, not counted."""
    num_slots: int
    iceoryx2_place: dict[str, str] | None
    folder: str
    """Where the ranks meet and leave their results."""

    @property
    def bring_up_steps(self) -> int:
        """Batches each contender delivers before anything is timed: every slot written and read twice, and checked."""
        return 2 * self.num_slots

    @property
    def num_steps(self) -> int:
        """Batches that each contender must be able to deliver."""
        per_pace = self.num_blocks * (self.lead_in_steps + self.steps_per_block)
        return self.bring_up_steps + per_pace * len(self.paces_ms)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What the measured steps of one block cost, all of the group's processes together."""

    wall_s: float
    rank_cpu_s: float
    """The ranks themselves, sleeping through the pace and waiting in the barrier included."""
    writer_cpu_s: float
    """Everything in the background: DataLoader workers, feeder, producer."""
    bytes_read: int
    """By the background."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Consecutive steps of one contender at one pace."""

    waits_ns: tuple[int, ...]
    """Per measured step: get_batch of the group's slowest rank."""
    lead_in_ns: tuple[int, ...]
    cost: Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """One contender in one case."""

    added_bytes: int
    """Host memory that the group needs more once this contender is up: all processes, page cache apart. To be believed
    if it is the only one."""
    num_background_processes: int
    blocks: Mapping[str, tuple[Block, ...]] = field(default_factory=dict)
    """By pace in ms, as text: JSON has no other keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """What the first rank writes."""

    deliveries: Mapping[str, Delivery]
    checked_batches: int
    """Batches whose bytes were the same in all contenders and on all ranks."""
