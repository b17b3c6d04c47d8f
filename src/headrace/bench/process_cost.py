"""What other processes cost: CPU seconds, memory, bytes read. And which of them are ours.

All of it comes from the kernel, for any process of the same user, without its help.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from headrace.measure.memory import kibibytes

PROC = Path("/proc")


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process so far, to the nanosecond; 0 once it is gone.

    clock_getcpuclockid(3) makes this clock's number from the pid; /proc/PID/stat counts in ticks of 10 ms.
    """
    try:
        return time.clock_gettime_ns(~pid << 3 | 2) / 1e9
    except OSError:
        return 0.0


def private_and_shared_bytes(pids: Iterable[int]) -> int:
    """Host memory that only these processes need: anonymous and shared pages, each page counted once (PSS).

    Pages of files (libraries, the token store) are left out: the page cache holds one copy for everybody, and gives it
    back when memory is short.
    """
    return sum(sum(kibibytes(PROC / str(pid) / "smaps_rollup", ("Pss_Anon", "Pss_Shmem")).values()) for pid in pids)


def bytes_read(pid: int) -> int:
    """Bytes that a process got from read(2) and its relatives so far, from the page cache or the disk; 0 if unknown."""
    try:
        lines = (PROC / str(pid) / "io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("rchar:")), 0)


def descendants(pid: int) -> set[int]:
    """The processes that `pid` started, and those that they started."""
    parents: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    pending = [pid]
    while pending:
        for child in parents.get(pending.pop(), ()):
            if child not in found:
                found.add(child)
                pending.append(child)
    return found


def pause(pids: Iterable[int]) -> None:
    """Stop processes until `resume`: they use no CPU meanwhile."""
    _signal(pids, signal.SIGSTOP)


def resume(pids: Iterable[int]) -> None:
    """Let stopped processes go on."""
    _signal(pids, signal.SIGCONT)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
