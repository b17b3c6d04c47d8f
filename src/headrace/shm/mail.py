"""Messages that carry descriptors over a unix socket, with the errors that they meet in real life."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time

from headrace.errors import ConfigError

MAX_DESCRIPTORS = 250
"""Of one message. The kernel's own bound is 253 (SCM_MAX_FD)."""

_MAX_BYTES = 256 * 1024
# Whoever does not take its message for so long is stopped, and is told nothing more.
_SEND_S = 5.0
_INT = struct.Struct("i")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def send(connection: socket.socket, message: bytes, fds: tuple[int, ...] = ()) -> None:
    """Send to somebody who may have died meanwhile: that is found by its pidfd, not here. Blocks at most 5 s."""
    connection.settimeout(_SEND_S)
    deadline = time.monotonic() + _SEND_S
    while True:
        try:
            socket.send_fds(connection, [message], fds)
        except OSError as error:
            # The kernel bounds the descriptors that are under way per user (RLIMIT_NOFILE): 60 readers with 60 pidfds
            # each pass it, until some of the readers have taken theirs.
            if error.errno == errno.ETOOMANYREFS and time.monotonic() < deadline:
                time.sleep(0.01)
                continue
        return


def receive(connection: socket.socket, max_descriptors: int) -> tuple[bytes, list[int]]:
    """One message and its descriptors, which are the caller's; b"" when the other end is closed.

    OSError, and ConfigError when this process may not hold that many descriptors.
    """
    # Not socket.recv_fds: it drops its flags (CPython 3.11-3.14), and what arrives would be inherited by every program
    # that this process starts.
    room = socket.CMSG_LEN(max_descriptors * _INT.size)
    raw, parcels, flags, _ = connection.recvmsg(_MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds = [
        fd
        for level, kind, data in parcels
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (fd,) in _INT.iter_unpack(data[: len(data) // _INT.size * _INT.size])
    ]
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise explained(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    return raw, fds


def explained(error: OSError) -> ConfigError:
    """What keeps this process from taking part, and the limit to raise."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ConfigError("this process has too many open files to join a feed; raise RLIMIT_NOFILE (`ulimit -n`)")
    return ConfigError(f"cannot join a feed: {error.strerror}")


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """pid, uid and gid of the other end; of a listener's end: of whoever called listen()."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def drop(connection: socket.socket, fds: list[int]) -> None:
    """Have nothing more to do with a connection and what came over it."""
    connection.close()
    for fd in fds:
        os.close(fd)
