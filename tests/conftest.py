"""What tests of several processes share: a hang ends with a word, and nothing is left behind."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

WATCHDOG_S = 150.0

# A job that a shell starts in the background ignores Ctrl-C, and so would every process the tests start from there.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def watchdog() -> Iterator[None]:
    """A hang shows every thread's stack, and ends: first by the dump, then hard."""
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=False)
    killer = threading.Timer(WATCHDOG_S + 5, os.kill, (os.getpid(), signal.SIGKILL))
    killer.daemon = True
    killer.start()
    yield
    killer.cancel()
    killer.join()
    faulthandler.cancel_dump_traceback_later()


def _children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def _our_mappings() -> int:
    return sum("memfd:headrace" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Processes, descriptors, mapped segments and names in /dev/shm are after a test what they were before."""
    gc.collect()
    names, children = set(os.listdir("/dev/shm")), _children()
    descriptors, mappings = len(os.listdir("/proc/self/fd")), _our_mappings()
    yield
    gc.collect()
    assert _children() <= children
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert _our_mappings() <= mappings
    # headrace_*: a benchmark of the iceoryx2 contender may run beside us, and that one does make names.
    left = {name for name in set(os.listdir("/dev/shm")) - names if "headrace" in name}
    assert not {name for name in left if not name.startswith("headrace_")}
