"""Starting the feeder: one fresh interpreter per group and host, which reads, packs and writes for all its ranks.

Never `multiprocessing`: spawn runs the user's script again, and the resource tracker unlinks what others still use.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError
from headrace.feed.config import FeedConfig
from headrace.feed.request import FeedRequest
from headrace.shm.peers import Peer, open_pidfd
from headrace.shm.placement import Placement

NAME = "headrace-feeder"  # 15 bytes: exactly what the kernel keeps of a process's name


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """What the feeder is told. `source` is pickled apart: it may need `sys_path` to be read."""

    source: bytes
    sys_path: list[str]
    config: FeedConfig
    data_rank: int
    data_size: int
    seed: int
    placement: Placement
    spans_hosts: bool
    """Other hosts' feeders read the same shard: batches carry a digest."""
    expected: dict[int, Peer]
    nonce: str
    listener_fd: int
    parent_pidfd: int | None
    parent_pid: int


def pickled(source: Callable[..., Any]) -> bytes:
    """The source as bytes. What is defined in `__main__` goes by value, since the feeder has another `__main__`."""
    try:
        import cloudpickle

        return bytes(cloudpickle.dumps(source))
    except ImportError:
        pass
    except Exception as error:
        raise ConfigError(f"the source cannot be sent to the feeder process: {error}") from error
    name = getattr(source, "__qualname__", type(source).__qualname__)
    if "__main__" in (getattr(source, "__module__", ""), type(source).__module__):
        raise ConfigError(
            f"the source {name} is defined in __main__, which the feeder process cannot import; "
            "move it into a module, or install cloudpickle (pip install 'headrace[sources]')"
        )
    try:
        return pickle.dumps(source)
    except Exception as error:
        raise ConfigError(f"the source {name} cannot be sent to the feeder process: {error}") from error


class Feeder:
    """The feeder as the rank that started it sees it."""

    def __init__(
        self,
        source: bytes,
        listener: socket.socket,
        nonce: str,
        request: FeedRequest,
        *,
        placement: Placement,
        spans_hosts: bool,
        expected: dict[int, Peer],
    ) -> None:
        """Starts it. Takes over `listener`: our copy is closed, so that the feeder's death closes the door."""
        with contextlib.ExitStack() as passed:
            passed.callback(listener.close)
            try:
                parent_pidfd = open_pidfd(os.getpid())
                if parent_pidfd is not None:
                    passed.callback(os.close, parent_pidfd)
                charge_fd = os.memfd_create("headrace-charge", os.MFD_CLOEXEC)
                passed.callback(os.close, charge_fd)
                charge = Charge(
                    source=source,
                    sys_path=sys.path,
                    config=request.config,
                    data_rank=request.data_rank,
                    data_size=request.data_size,
                    seed=request.seed,
                    placement=placement,
                    spans_hosts=spans_hosts,
                    expected=expected,
                    nonce=nonce,
                    listener_fd=listener.fileno(),
                    parent_pidfd=parent_pidfd,
                    parent_pid=os.getpid(),
                )
                with open(charge_fd, "wb", closefd=False) as file:
                    file.write(pickle.dumps(charge))
                fds = [charge_fd, listener.fileno()] + ([] if parent_pidfd is None else [parent_pidfd])
                self._process = _start(charge_fd, fds)
            except OSError as error:
                raise ConfigError(f"cannot start the feeder process: {error}") from error
        self.pid = self._process.pid

    def close(self) -> None:
        """Reap it when it ends: with the last reader that leaves, or with this process at the latest."""
        # No thread can be started while the interpreter shuts down, and then there is no need to.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._process.wait, name=f"reaper of {NAME} {self.pid}", daemon=True).start()


def _start(charge_fd: int, fds: list[int]) -> subprocess.Popen[bytes]:
    # Ctrl-C goes to the whole terminal group, but a feeder ends with its ranks: it is born with SIGINT blocked, and
    # unblocks it once it ignores it.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            # -P: a file called queue.py in the current folder is not the standard library's.
            [sys.executable, "-P", "-m", "headrace.feed.process", NAME, str(charge_fd)],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
