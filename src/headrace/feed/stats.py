"""What a feed tells about itself: the logs, the command line and the tests read the same numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedStats:
    """Plain numbers since the feed was made, as this rank sees them."""

    rank: int
    writer: str
    """Who writes: the feeder, or a rank."""
    writer_pid: int
    delivered: int
    """Batches this rank took."""
    ahead: int
    """Versions published and not yet taken by this rank: 0 means the writer is the bottleneck now."""
    num_waits: int
    """Bounded sleeps (at most 100 ms each) in which this rank waited for the writer."""
    wait_s: float
    """Time this rank waited for the writer."""
    writer_wait_s: float | None
    """Time the writer waited for a free slot; known only to the rank that writes itself."""
    num_slots: int
    slot_bytes: int
    placement: str | None
    """Where the feeder runs and its memory lies, and why; known to the rank that started it."""

    @property
    def ring_bytes(self) -> int:
        """Host memory of the ring's data, shared by all ranks of the host."""
        return self.num_slots * self.slot_bytes
