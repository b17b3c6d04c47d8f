"""How the members of a group tell each other small things once, at the start. The only collective step of a feed."""

from __future__ import annotations

from typing import Protocol


class Rendezvous(Protocol):
    """Implemented over a process group's store (headrace.torch.group), and by Alone."""

    def exchange(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Give everybody `payload`, get everybody's in group order. Called once per feed, by every member.

        Blocks until all have called. FeedTimeout names who is missing. Must not use a device collective.
        """


class Alone:
    """A group of one process."""

    def exchange(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        return [payload]
