"""Shared memory without a name: memfd, sized once, reserved before use.

No name means no 64 MB /dev/shm of a container, no collision, nothing left after SIGKILL, and no resource tracker that
unlinks what others still use. The size is sealed and the pages reserved at once, so that a missing page is an error
message at the start and never a SIGBUS in the middle of a run.
"""

from __future__ import annotations

import errno
import fcntl
import os

import numpy as np

from headrace._native import Mapping
from headrace.errors import ConfigError
from headrace.shm.limits import check_headroom
from headrace.spec import ARENA_ALIGNMENT, align

_MFD_NOEXEC_SEAL = 0x0008  # Linux 6.3; where vm.memfd_noexec=2 nothing else is allowed
_PIECE_BYTES = 4 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1; works on memfd although transparent huge pages for shmem are off
_F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_SEALS = 0x0001 | 0x0002 | 0x0004  # no further seals, no shrinking (hence no SIGBUS), no growing


def create(name: str, nbytes: int, *, knob: str) -> int:
    """A sealed, reserved memfd of at least `nbytes` (rounded up to 64 KiB). The caller owns the descriptor.

    `name` shows in /proc/PID/fd. ConfigError names the limit in the way and `knob`, the setting that asks for less.
    """
    nbytes = align(nbytes, ARENA_ALIGNMENT)
    check_headroom(nbytes, knob=knob)
    try:
        fd = _memfd(name)
    except OSError as error:
        raise _explained(error, "open a descriptor for", nbytes, knob) from error
    try:
        os.ftruncate(fd, nbytes)
        for offset in range(0, nbytes, _PIECE_BYTES):
            # A signal undoes the call that it interrupts: in one piece, a profiler's timer would keep it from ending.
            os.posix_fallocate(fd, offset, min(_PIECE_BYTES, nbytes - offset))
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise _explained(error, "reserve", nbytes, knob) from error
        raise
    return fd


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def attach(fd: int, *, writable: bool, knob: str, populate: bool = False) -> Mapping:
    """Map a whole segment. The mapping does not need `fd` afterwards; it lives as long as a view of it.

    `populate` touches every page now: the first touch of shared memory runs at about 1 GB/s, 30 times slower than a
    copy, and belongs to the start, not to the first batches.
    """
    nbytes = os.fstat(fd).st_size
    try:
        mapping = Mapping(fd, nbytes, _alignment_for(nbytes), writable)
    except OSError as error:
        raise _explained(error, "map", nbytes, knob) from error
    if populate and writable:
        # Both are advice: older kernels answer EINVAL and fault the pages in one by one.
        mapping.advise(MADV_POPULATE_WRITE)
        mapping.advise(MADV_COLLAPSE)
    return mapping


def _alignment_for(nbytes: int) -> int:
    """Huge pages can only be had at an address that is a multiple of theirs: MADV_COLLAPSE says EINVAL at any other."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size") as file:
            huge = int(file.read())
    except (OSError, ValueError):
        return ARENA_ALIGNMENT
    return huge if ARENA_ALIGNMENT < huge <= nbytes else ARENA_ALIGNMENT


def memory(mapping: Mapping) -> np.ndarray:
    """The bytes of a mapping (uint8). The array, and every view made from it, keeps the mapping alive."""
    return np.frombuffer(memoryview(mapping), np.uint8)


_LIMITS = {
    errno.ENOSPC: "the memory for shared files is full",
    errno.ENOMEM: "the memory or this process's address space (RLIMIT_AS) is too small",
    errno.EFBIG: "the largest file size (RLIMIT_FSIZE) is below that",
    errno.EMFILE: "this process has too many open files (RLIMIT_NOFILE)",
    errno.ENFILE: "the machine has too many open files",
}


def _explained(error: OSError, action: str, nbytes: int, knob: str) -> ConfigError:
    reason = _LIMITS.get(error.errno or 0, error.strerror or str(error))
    return ConfigError(f"cannot {action} {nbytes:,} bytes of shared memory: {reason}; lower {knob} or raise the limit")
