"""Starting the feeder: one fresh interpreter per group and host, which reads, packs and writes for all its ranks.

Never `multiprocessing`: spawn runs the user's script again, and the resource tracker unlinks what others still use.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.errors import ConfigError
from headrace.feed.config import FeedConfig
from headrace.shm.peers import Peer, open_pidfd

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
        config: FeedConfig,
        *,
        expected: dict[int, Peer],
        data_rank: int,
        data_size: int,
        seed: int,
    ) -> None:
        """Starts it. Takes over `listener`: our copy is closed, so that the feeder's death closes the door."""
        parent_pidfd = open_pidfd(os.getpid())
        charge = Charge(
            source=source,
            sys_path=sys.path,
            config=config,
            data_rank=data_rank,
            data_size=data_size,
            seed=seed,
            expected=expected,
            nonce=nonce,
            listener_fd=listener.fileno(),
            parent_pidfd=parent_pidfd,
            parent_pid=os.getpid(),
        )
        charge_fd = os.memfd_create("headrace-charge", os.MFD_CLOEXEC)
        passed = [charge_fd, listener.fileno()] + ([] if parent_pidfd is None else [parent_pidfd])
        try:
            with open(charge_fd, "wb", closefd=False) as file:
                file.write(pickle.dumps(charge))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace.feed.process", NAME, str(charge_fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
            )
        finally:
            listener.close()
            for fd in passed[:1] + passed[2:]:
                os.close(fd)
        self.pid = self._process.pid

    def close(self) -> None:
        """Reap it when it ends: with the last reader that leaves, or with this process at the latest."""
        threading.Thread(target=self._process.wait, daemon=True).start()
