"""The floor of any blocking hand-over: one word in shared memory, one futex wake. No ring, no payload."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

# Numbers of futex(2) in the kernel's tables for each machine.
_SYSCALLS = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class BareFutex:
    """A word and a stamp (nanoseconds) in a memfd, for one process that wakes and one that sleeps."""

    def __init__(self, fd: int | None = None) -> None:
        """Makes the memory, or maps what another process has made; `fd` is this object's in the first case only."""
        self.fd = os.memfd_create("headrace-futex", 0) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, mmap.PAGESIZE)
        self._memory = mmap.mmap(self.fd, mmap.PAGESIZE)
        self._word = ctypes.c_uint32.from_buffer(self._memory, 0)
        self._stamp = ctypes.c_int64.from_buffer(self._memory, 64)
        self._address = ctypes.addressof(self._word)
        self._syscall = ctypes.CDLL(None).syscall
        self._number = _SYSCALLS[platform.machine()]
        self._seen = self._word.value

    def wake(self, stamp_ns: int) -> None:
        """Leave a stamp and wake the sleeper. One writer: nothing needs to be atomic but the word's own store."""
        self._stamp.value = stamp_ns
        self._word.value += 1
        self._syscall(self._number, ctypes.c_void_p(self._address), _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def sleep(self) -> int:
        """The next stamp. Blocks."""
        while self._word.value == self._seen:
            seen = ctypes.c_uint32(self._seen)
            self._syscall(self._number, ctypes.c_void_p(self._address), _FUTEX_WAIT, seen, None, None, 0)
        self._seen += 1
        return self._stamp.value
