"""Can this machine carry a ring, how well, and what to change? Each check tries the thing itself where it can."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from headrace.errors import HeadraceError
from headrace.shm import handover, segment
from headrace.shm.handover import Door
from headrace.shm.limits import headrooms
from headrace.shm.peers import WRITER, Peer, Watch, open_pidfd, start_time
from headrace.shm.placement import read_cores
from headrace.shm.ring_reader import RingReader
from headrace.shm.ring_writer import DATA, RingWriter, is_debugging
from headrace.shm.waiting import RingConfig
from headrace.spec import BatchSpec, Field

ROOT = Path("/")
GIB = 1 << 30
_TRIAL_BYTES = 1 << 20
_ROOM_BYTES = GIB
"""A ring of four slots of 128k tokens in six int64 fields takes 25 MB; a GiB of room is plenty for most jobs."""
_DESCRIPTORS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One answer. `change` is empty when there is nothing to change."""

    name: str
    status: Literal["good", "note", "bad"]
    """bad: no feed can run. note: it runs, slower or with less notice than it could."""
    found: str
    change: str = ""


def check_all(root: Path = ROOT) -> list[Finding]:
    """All checks of this floor, in the order in which a feed would meet them. Costs some milliseconds."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _check_ring,
        _check_pidfd,
        _check_advice,
        lambda: _check_memory(root),
        _check_limits,
        lambda: _check_cores(root),
        _check_scheduling,
        _check_debugging,
    )
    return [finding for check in checks for finding in check()]


def _check_ring() -> Iterator[Finding]:
    """Send one batch through a ring between two ends of this process: memfd, seals, sockets, descriptors, futex."""
    try:
        _send_one_batch()
    except (HeadraceError, OSError) as error:
        yield Finding(name="ring", status="bad", found=str(error), change="see the limit named here")
    else:
        yield Finding(name="ring", status="good", found="a batch went through (memfd, seals, unix socket, futex)")


def _send_one_batch() -> None:
    config, me = RingConfig(timeout_s=5.0), os.getpid()
    listener, invitation = handover.listen()
    door = Door(listener=listener, nonce=invitation.nonce)
    expected = {0: Peer(who="reader", rank=0, pid=0, started=0, pidfd=None)}
    connection = handover.knock(invitation, index=0, rank=0, state=b"")
    try:
        door.admit(expected, timeout_s=5.0)
        host = Peer(who="writer", rank=None, pid=me, started=start_time(me), pidfd=open_pidfd(me))
        watch = Watch({WRITER: host, 0: door.guests[0].peer})
        writer = RingWriter(config, watch=watch, num_readers=1, slot_bytes=_TRIAL_BYTES, max_slot_bytes=_TRIAL_BYTES)
        reader = RingReader(
            config,
            index=0,
            who="reader",
            control_fd=writer.control_fd,
            data_fd=writer.data_fd,
            slot_bytes=writer.slot_bytes,
            watch=watch,
            receive_data=lambda: (-1, 0),
            wrap=lambda array: array,
        )
        slot, arrays = writer.begin(BatchSpec(fields=(Field(name="values", dtype="int64", shape=(1000,)),)))
        arrays["values"][:] = np.arange(1000)
        writer.publish(slot, counts=(), lengths=(), blob=b"")
        delivery = reader.next()
        assert delivery[2] == DATA
        assert int(reader.arrays(delivery)["values"].sum()) == 499_500
        reader.close()
        writer.close()
        watch.close()
    finally:
        connection.close()
        door.close()


def _check_pidfd() -> Iterator[Finding]:
    pidfd = open_pidfd(os.getpid())
    if pidfd is not None:
        os.close(pidfd)
        yield Finding(name="pidfd", status="good", found="deaths are noticed within 100 ms, whatever happens to pids")
    elif start_time(os.getpid()):
        yield Finding(
            name="pidfd",
            status="note",
            found="not available: deaths are noticed by pid and start time",
            change="Linux 5.3 or newer, and a seccomp profile that allows pidfd_open",
        )
    else:
        yield Finding(
            name="pidfd",
            status="bad",
            found="neither pidfd nor /proc/PID/stat is available: a death would go unnoticed",
            change="mount /proc, or allow pidfd_open",
        )


def _check_advice() -> Iterator[Finding]:
    try:
        fd = segment.create("headrace-checkup", 4 << 20, knob="nothing")
        try:
            mapping = segment.attach(fd, writable=True, knob="nothing")
        finally:
            os.close(fd)
    except HeadraceError:
        return  # _check_ring has said why
    for name, advice, use, kernel in (
        ("populate", segment.MADV_POPULATE_WRITE, "the pages made at the start, not by the first batches", "5.14"),
        ("huge pages", segment.MADV_COLLAPSE, "first touches made about ten times cheaper", "6.1"),
    ):
        code = mapping.advise(advice)
        if code == 0:
            yield Finding(name=name, status="good", found=use)
        else:
            change = f"Linux {kernel} or newer (with huge pages) has {use}"
            yield Finding(name=name, status="note", found=f"not here: {os.strerror(code)}", change=change)
    mapping.close()


def _check_memory(root: Path) -> Iterator[Finding]:
    for room in headrooms(root):
        enough = room.free_bytes >= _ROOM_BYTES
        yield Finding(
            name="memory",
            status="good" if enough else "note",
            found=f"{room.name}: {room.free_bytes / GIB:.1f} GiB free of {room.limit_bytes / GIB:.1f}",
            change="" if enough else "raise this limit, or keep num_slots x slot_bytes below it",
        )


def _check_limits() -> Iterator[Finding]:
    for name, enough, change in (
        ("RLIMIT_NOFILE", _DESCRIPTORS, "`ulimit -n 1024`: a feed takes about 5 + 2 x ranks of this host"),
        ("RLIMIT_AS", None, "`ulimit -v unlimited`: every rank maps the whole ring"),
        ("RLIMIT_FSIZE", None, "`ulimit -f unlimited`: it bounds the ring's size as well"),
    ):
        soft, _ = resource.getrlimit(getattr(resource, name))
        good = soft == resource.RLIM_INFINITY or (enough is not None and soft >= enough)
        found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
        yield Finding(name=name, status="good" if good else "note", found=found, change="" if good else change)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
    yield Finding(
        name="RLIMIT_MEMLOCK", status="good", found=f"{found}; drivers that pin by mlock need the ring's size"
    )


def _check_cores(root: Path) -> Iterator[Finding]:
    cores, online = read_cores(), os.cpu_count() or 1
    quota = _cpu_quota(root)
    usable = min(len(cores.allowed), quota or len(cores.allowed))
    found = f"{len(cores.allowed)} of {online} may be used" + (f", {quota:g} at a time" if quota else "")
    change = "" if usable >= 2 else "give the container two cores at least: ranks and their feeder share one now"
    yield Finding(name="cores", status="note" if change else "good", found=found, change=change)
    nodes = {node for node, cpus in cores.nodes.items() if cpus & cores.allowed}
    yield Finding(name="NUMA", status="good", found=f"{len(nodes) or 1} node{'s' * (len(nodes) > 1)} with usable cores")


def _cpu_quota(root: Path) -> float | None:
    """Cores' worth of time that this container gets (cgroup v2, then v1); None: no quota is to be seen."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        microseconds = int((root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        period_us = int((root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text())
        return microseconds / period_us if microseconds > 0 else None
    except (OSError, ValueError):
        return None


def _check_scheduling() -> Iterator[Finding]:
    before = os.sched_getscheduler(0)
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.sched_setscheduler(0, before, os.sched_param(0))
        yield Finding(name="SCHED_BATCH", status="good", found="the feeder will not preempt the ranks")
    except OSError as error:
        change = "allow sched_setscheduler: without it a feeder that wakes up delays the rank on its core"
        yield Finding(name="SCHED_BATCH", status="note", found=error.strerror or "refused", change=change)


def _check_debugging() -> Iterator[Finding]:
    if is_debugging():
        change = "unset HEADRACE_DEBUG for real runs"
        yield Finding(
            name="HEADRACE_DEBUG", status="note", found="on: slots are poisoned, which costs time", change=change
        )
