"""Who is alive. A pidfd tells, whatever happened to the pid; without one, the pid and its start time tell.

A heartbeat would not do: a stopped or starved process is slow, not dead. An inherited socket or lock would not do:
a forked DataLoader worker keeps it open and hides the death.
"""

from __future__ import annotations

import contextlib
import os
import select
from dataclasses import dataclass
from pathlib import Path


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 if it is gone, a zombie, or not visible here."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command in parentheses may itself hold spaces and parentheses: fields count from the last one.
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the kernel has none (before 5.3)."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Another process of the ring. `rank` is None for the feeder. `pidfd` is owned by the Watch that holds the peer."""

    who: str
    rank: int | None
    pid: int
    started: int
    pidfd: int | None

    def is_alive(self) -> bool:
        if self.pidfd is not None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            return not poll.poll(0)
        return start_time(self.pid) == self.started


class Watch:
    """The peers that somebody depends on. Owns their pidfds."""

    def __init__(self, peers: dict[int, Peer]) -> None:
        """`peers` by reader index; the writer's key is WRITER."""
        self._peers = peers
        self._poll = select.poll()
        self._by_fd = {}
        for key, peer in peers.items():
            if peer.pidfd is not None:
                self._poll.register(peer.pidfd, select.POLLIN)
                self._by_fd[peer.pidfd] = key

    def peer(self, key: int) -> Peer:
        return self._peers[key]

    def dead(self) -> list[int]:
        """Keys of the peers that ended. One poll for all; a few microseconds."""
        keys = [self._by_fd[fd] for fd, _ in self._poll.poll(0)] if self._by_fd else []
        keys += [key for key, peer in self._peers.items() if peer.pidfd is None and not peer.is_alive()]
        return keys

    def close(self) -> None:
        for fd in self._by_fd:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._by_fd = {}
        self._peers = {key: peer for key, peer in self._peers.items() if peer.pidfd is None}


WRITER = -1
"""The writer's key in a Watch."""
