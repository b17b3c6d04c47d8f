"""Every test here runs under a watchdog and leaves nothing behind."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from .company import Company

WATCHDOG_S = 150.0


@pytest.fixture(autouse=True)
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


@pytest.fixture(autouse=True)
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
    assert not {name for name in set(os.listdir("/dev/shm")) - names if "headrace" in name}


@pytest.fixture
def company() -> Iterator[Company]:
    """Processes to lead. They must not have written a word to stderr: no tracker, no crash report."""
    group = Company()
    yield group
    assert group.disband() == ""


@pytest.fixture(scope="session")
def crashing_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension with its crash points compiled in."""
    import sysconfig

    root = Path(__file__).parents[2]
    target = tmp_path_factory.mktemp("build") / "_native.abi3.so"
    import numpy

    subprocess.run(
        [
            *("gcc", "-shared", "-fPIC", "-std=c11", "-O1", "-D_GNU_SOURCE", "-DPy_LIMITED_API=0x030B0000"),
            *("-DHEADRACE_CRASHPOINTS", f"-I{sysconfig.get_path('include')}", f"-I{numpy.get_include()}"),
            *(str(path) for path in sorted((root / "native").glob("*.c"))),
            *("-o", str(target)),
        ],
        check=True,
    )
    return target
