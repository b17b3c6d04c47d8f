"""How the members of a group tell each other small things. The exchange at the start is the only collective step."""

from __future__ import annotations

from typing import Protocol


class Rendezvous(Protocol):
    """Implemented over a process group's store (headrace.torch.group), and by Alone."""

    def exchange(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Give everybody `payload`, get everybody's in group order. Called once per feed, by every member.

        Blocks until all have called. FeedTimeout names who is missing. Must not use a device collective.
        """

    def post(self, key: str, value: bytes) -> None:
        """Leave something where every member can look for it. Waits for nobody. Used by groups over several hosts."""

    def look(self, key: str) -> bytes | None:
        """What was posted under `key`; None if it was not yet. Waits for nobody."""


class Alone:
    """A group of one process."""

    def exchange(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        return [payload]

    def post(self, key: str, value: bytes) -> None:
        """Nobody looks."""

    def look(self, key: str) -> bytes | None:
        return None
