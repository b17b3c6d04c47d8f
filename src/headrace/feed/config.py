"""What a user decides about a feed. Facts of the run (ranks, hosts) are in topology.py."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.arguments import check_seconds, whole_number
from headrace.errors import ConfigError
from headrace.shm.placement import parse_cpus
from headrace.shm.waiting import RingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedConfig:
    """The same on every rank of a group; ranks that disagree are all refused."""

    num_slots: int = 4
    """Batches that exist at once. More hides jitter of the source, costs one slot of host memory each."""
    hold: int = 1
    """A batch stays valid while it is one of the last `hold` batches."""
    slot_bytes: int | None = None
    """Size of a slot; None: what the first batch needs. A larger batch makes the slots grow."""
    max_slot_bytes: int = 1 << 30
    """A batch beyond this is refused (BatchTooLarge)."""
    timeout_s: float = 1800.0
    """Ends any wait. Longer than a compile or a checkpoint; a death is noticed at once, not by this."""
    stall_warning_s: float = 30.0
    """Log who waits for whom after this long, once per stall."""
    start_timeout_s: float = 300.0
    """Ends the wait for the group's other ranks when the feed is made."""
    owned: bool = False
    """Hand out copies that stay valid for ever instead of views into the ring."""

    feeder_cpus: str | None = None
    """Where the feeder runs, such as "0-3,8"; None: near the ranks' devices and off the cores they are pinned to."""

    def __post_init__(self) -> None:
        _ = self.ring  # checks num_slots, hold and the waits
        check_seconds("start_timeout_s", self.start_timeout_s)
        whole_number("max_slot_bytes", self.max_slot_bytes)
        if self.slot_bytes is not None:
            whole_number("slot_bytes", self.slot_bytes)
        if self.max_slot_bytes <= 0 or (self.slot_bytes is not None and self.slot_bytes <= 0):
            raise ConfigError(f"slot sizes must be positive, got {self.slot_bytes} and {self.max_slot_bytes}")
        if self.slot_bytes is not None and self.slot_bytes > self.max_slot_bytes:
            raise ConfigError(f"slot_bytes {self.slot_bytes:,} is more than max_slot_bytes {self.max_slot_bytes:,}")
        if self.feeder_cpus is not None:
            if not isinstance(self.feeder_cpus, str):
                raise ConfigError(f"feeder_cpus must be text such as '0-3,8', got {self.feeder_cpus!r}")
            parse_cpus(self.feeder_cpus)

    @property
    def ring(self) -> RingConfig:
        """The part that the ring needs."""
        return RingConfig(
            num_slots=self.num_slots,
            hold=self.hold,
            timeout_s=self.timeout_s,
            stall_warning_s=self.stall_warning_s,
        )
