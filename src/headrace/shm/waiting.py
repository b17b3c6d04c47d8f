"""What happens while somebody waits: a deadline, and one report per stall that says who waits for whom."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace import _native
from headrace.arguments import check_seconds, whole_number
from headrace.errors import ConfigError, FeedTimeout

log = logging.getLogger("headrace")

# How long the native end waits before Python thinks about it, for the first time. It sleeps in ticks of 100 ms and
# returns at once when a peer has ended, so a death is known within one of those; without pidfds each tick has to be
# Python's.
TICK_S = 0.5
TICK_WITHOUT_PIDFDS_S = 0.1
# Two looks at the clock that are further apart were spent stopped (a batch system may suspend a whole job for hours) or
# starved: such time says nothing about the others, and counts as this much. native/ring_end.h does the same.
LONGEST_TICK_S = 2.0
# So that what is due is over when the next tick begins.
_OVERDUE_S = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class RingConfig:
    """How a ring is sized and how long its ends wait."""

    num_slots: int = 4
    """Batches that exist at once, read or unread. More hides jitter, costs slot_bytes each."""
    hold: int = 1
    """A reader's last `hold` batches stay valid."""
    timeout_s: float = 1800.0
    """Ends any wait. Longer than a compile or a checkpoint; a death is noticed at once, not by this."""
    stall_warning_s: float = 30.0
    """Log who waits for whom after this long, once per stall."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "hold"):
            whole_number(name, getattr(self, name))
        for name in ("timeout_s", "stall_warning_s"):
            check_seconds(name, getattr(self, name))
        if self.num_slots < 2:
            raise ConfigError(f"num_slots must be at least 2 (one written, one read), got {self.num_slots}")
        if self.num_slots > _native.MAX_SLOTS:
            raise ConfigError(f"num_slots must be at most {_native.MAX_SLOTS}, got {self.num_slots}")
        if not 1 <= self.hold < self.num_slots:
            raise ConfigError(
                f"hold must lie in [1, num_slots): {self.hold} batches kept by each reader leave no slot of "
                f"{self.num_slots} to write; raise num_slots to at least {self.hold + 1}"
            )


class Patience:
    """One wait, from its first fruitless tick to its end. `describe` says who waits for whom.

    `clock` may leave out what does not count; then `longest_tick_s` is infinite.
    """

    def __init__(
        self,
        config: RingConfig,
        describe: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        *,
        longest_tick_s: float = LONGEST_TICK_S,
    ) -> None:
        self._config, self._describe, self._clock, self._longest_tick_s = config, describe, clock, longest_tick_s
        self._last = clock()
        self._waited_s = 0.0
        self._warned = False

    def check(self) -> float:
        """Call once per tick. Seconds until there is something to say; FeedTimeout when it has become too long."""
        now = self._clock()
        self._waited_s += min(now - self._last, self._longest_tick_s)
        self._last = now
        if self._waited_s > self._config.timeout_s:
            raise FeedTimeout(self._describe(), timeout_s=self._config.timeout_s)
        if self._waited_s > self._config.stall_warning_s and not self._warned:
            self._warned = True
            log.warning("stalled for %.1f s: waiting for %s", self._waited_s, self._describe())
        due_s = self._config.timeout_s if self._warned else min(self._config.stall_warning_s, self._config.timeout_s)
        return due_s - self._waited_s + _OVERDUE_S
