"""What processes used, as the kernel counts it. None where the kernel does not tell, never 0."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from headrace.measure.memory import host_memory
from headrace.shm.peers import open_pidfd, start_time

PROC = Path("/proc")


def descendants(pid: int) -> frozenset[int]:
    """Ids of the processes below `pid`, itself left out."""
    parents = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            # The name in parentheses may hold parentheses itself; the parent is the second field after it.
            with suppress(OSError, ValueError, IndexError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    generation = {pid}
    while generation:
        generation = {child for child, parent in parents.items() if parent in generation} - found
        found |= generation
    return frozenset(found)


def cpu_ns(pids: Iterable[int]) -> int:
    """Nanoseconds that the living threads of `pids` have run on a processor.

    The scheduler's own count: utime and stime come in ticks of 10 ms, more than a feed uses in a hundred batches.
    """
    total = 0
    for pid in pids:
        for task in (PROC / str(pid) / "task").glob("*/schedstat"):
            with suppress(OSError, ValueError, IndexError):
                total += int(task.read_text().split()[0])
    return total


def bytes_read(pids: Iterable[int]) -> int | None:
    """Bytes that `pids` got from read calls: from files, cached or not, pipes and sockets; None if one is not told.

    Beside its rows a worker of a DataLoader reads which batch to make, and 91 bytes for each tensor whose memory it
    hands over (handshake and request on a socket): 568 for a batch of six.
    """
    total = 0
    for pid in pids:
        try:
            counts = (PROC / str(pid) / "io").read_text()
        except OSError:
            return None
        total += int(counts.split("rchar:")[1].split()[0])
    return total


def resident_bytes(pids: Iterable[int]) -> int | None:
    """Proportional resident memory: a page that n processes share counts 1/n in each, so the sum counts it once."""
    total = 0
    for pid in pids:
        memory = host_memory(PROC / str(pid), proportional=True)
        if memory is not None and memory.pss_bytes is not None:
            total += memory.pss_bytes
        elif start_time(pid):
            return None  # alive and not told; the dead and the not yet reaped hold nothing
    return total


def wait_until_gone(pids: Iterable[int], *, timeout_s: float) -> list[int]:
    """Blocks until these processes have ended, at most `timeout_s` for each; returns those that have not."""
    alive = []
    for pid in pids:
        pidfd = open_pidfd(pid)
        if pidfd is None:
            continue
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            alive.append(pid)
        os.close(pidfd)
    return alive
