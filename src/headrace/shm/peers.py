"""Who is alive. A pidfd tells, whatever happened to the pid; without one, the pid and its start time tell.

A heartbeat would not do: a stopped or starved process is slow, not dead. An inherited socket or lock would not do:
a forked DataLoader worker keeps it open and hides the death.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError

WRITER = -1
"""The writer's key in a Watch."""
# /proc/PID/stat's letters, proc(5). What a person wants to know of a process that is waited for.
_STATES = {"R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped by a signal", "t": "in a debugger"}
_ENDED = "ZX"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if the process is gone or not visible here."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The command in parentheses may itself hold spaces and parentheses: fields count from the last one.
    return stat.rpartition(")")[2].split()


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 if it is gone, a zombie, or not visible here."""
    fields = _stat(pid)
    return 0 if not fields or fields[0] in _ENDED else int(fields[19])


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends. The caller owns it.

    None where there is none: kernels before 5.3, sandboxes that forbid the call, a process that is gone. ConfigError
    when this process may open no more files: to go on without would be to miss deaths.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ConfigError(
                "cannot watch another process: this one has too many open files; raise RLIMIT_NOFILE (`ulimit -n`)"
            ) from error
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
        # 0 is the start time of a process that was gone when it was asked for: it would equal itself for ever.
        return self.started != 0 and start_time(self.pid) == self.started

    def describe(self) -> str:
        """The peer for a person who looks for the cause of a wait: name, pid, and what its process does right now."""
        if not self.is_alive():
            return f"{self.who} (pid {self.pid}, dead)"
        fields = _stat(self.pid)
        # A peer of another pid namespace: its pid is somebody else's here, and only its life is known.
        known = fields and int(fields[19]) == self.started
        return f"{self.who} (pid {self.pid}, {_STATES.get(fields[0], 'alive') if known else 'alive'})"


class Watch:
    """The peers that somebody depends on. Owns their pidfds."""

    def __init__(self, peers: dict[int, Peer]) -> None:
        """`peers` by reader index; the writer's key is WRITER."""
        self._peers = peers
        self._poll = select.poll()
        self._by_fd: dict[int, int] = {}
        for key, peer in peers.items():
            if peer.pidfd is not None:
                self._poll.register(peer.pidfd, select.POLLIN)
                self._by_fd[peer.pidfd] = key

    def peer(self, key: int) -> Peer:
        return self._peers[key]

    @property
    def pidfds(self) -> tuple[int, ...]:
        """The descriptors of all peers that have one; they stay the Watch's."""
        return tuple(self._by_fd)

    @property
    def is_complete(self) -> bool:
        """Does every peer have a pidfd?"""
        return len(self._by_fd) == len(self._peers)

    def is_writer(self, key: int) -> bool:
        """Is this reader the process that writes as well? Its two pidfds need not become readable in one poll."""
        reader, writer = self._peers[key], self._peers.get(WRITER)
        return writer is not None and (reader.pid, reader.started) == (writer.pid, writer.started)

    def dead(self) -> list[int]:
        """Keys of the peers that ended. One poll for all; a few microseconds."""
        ended = self._poll.poll(0) if self._by_fd else []
        keys = [self._by_fd[fd] for fd, events in ended if events & select.POLLIN]
        keys += [key for key, peer in self._peers.items() if peer.pidfd is None and not peer.is_alive()]
        return keys

    def close(self) -> None:
        for fd in self._by_fd:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._by_fd = {}
        self._peers = {key: peer for key, peer in self._peers.items() if peer.pidfd is None}
