"""What the processes of `headrace bench handover` are told and what they report. Plain data, JSON both ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderCharge:
    """What a reader is told. Descriptors are inherited."""

    contender: str
    """ "ring", "iceoryx2", "futex", or "clock": nothing between two looks at the clock."""
    index: int = 0
    num_readers: int = 1
    num_slots: int = 2
    control_fd: int = -1
    data_fd: int = -1
    slot_bytes: int = 0
    writer_pid: int = 0
    writer_started: int = 0
    futex_fd: int = -1
    iceoryx2_place: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedCharge:
    """What the rank is told."""

    source: dict[str, Any]
    """PackedTokens' arguments."""
    num_slots: int
    num_bursts: int
    """Of num_slots / 2 batches each: the writer is not woken in the middle of one."""
    num_after_gap: int
    gap_s: float
    paced_s: float
    idle_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedTimes:
    """Nanoseconds per batch, one pair of looks at the clock included."""

    next_hot_ns: list[int]
    """`next(feed)` alone."""
    hot_ns: list[int]
    """`next(feed)` and each field looked at."""
    next_after_gap_ns: list[int]
    after_gap_ns: list[int]
    feeder_cpu: float
    """In cores, while a batch is taken every gap_s."""
    rank_cpu: float
    """The same of the rank itself."""
    idle_cpu_fraction: float
    """CPU over wall time of a rank that waits for a batch."""
    idle_wall_s: float
    bare_ticks_cpu_fraction: float
    """The same of the same process when it does nothing but wake ten times a second, as often as a rank that waits."""
