"""What the kernel says about processes: read of some that were told what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.demo.processes import bytes_read, cpu_ns, descendants, resident_bytes, wait_until_gone

CHILD = """
import subprocess, sys
held = bytearray(b"x") * {hold}
with open({path!r}, "rb", buffering=0) as file:
    for _ in range(4):
        file.seek(0)
        file.read()
grandchild = subprocess.Popen([sys.executable, "-c", "input()"], stdin=sys.stdin)
for _ in range({rounds}):
    pass
print(grandchild.pid, flush=True)
grandchild.wait()
"""
FILE_BYTES, HELD_BYTES, ROUNDS = 3_000_000, 64_000_000, 2_000_000


def start(path: Path, *, hold: int, rounds: int) -> tuple[subprocess.Popen[str], int]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(path=str(path), hold=hold, rounds=rounds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    return child, int(child.stdout.readline())


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    path = tmp_path / "read"
    path.write_bytes(b"x" * FILE_BYTES)
    started = start(path, hold=HELD_BYTES, rounds=ROUNDS)
    yield started
    if started[0].poll() is None:
        started[0].communicate("\n")


def test_descendants_are_found_over_generations(child: tuple[subprocess.Popen[str], int]) -> None:
    process, grandchild = child
    assert {process.pid, grandchild} <= descendants(os.getpid())
    assert descendants(process.pid) == {grandchild}
    assert os.getpid() not in descendants(os.getpid())


def test_counters_are_of_what_the_process_did(child: tuple[subprocess.Popen[str], int], tmp_path: Path) -> None:
    process, grandchild = child
    idle, idle_grandchild = start(tmp_path / "read", hold=1, rounds=1)
    both = [process.pid, idle.pid]
    # Both have read the interpreter and the file; only one holds the array and has counted.
    read = bytes_read([process.pid])
    assert read is not None
    assert read >= 4 * FILE_BYTES
    assert bytes_read(both) == read + (bytes_read([idle.pid]) or 0)
    held, little = resident_bytes([process.pid]), resident_bytes([idle.pid])
    assert held is not None
    assert little is not None
    assert held - little > HELD_BYTES / 2
    assert cpu_ns([process.pid]) > cpu_ns([grandchild]) > 0
    idle.communicate("\n")
    assert wait_until_gone([idle_grandchild], timeout_s=60) == []


def test_the_dead_hold_nothing_and_cannot_be_read(child: tuple[subprocess.Popen[str], int]) -> None:
    process, grandchild = child
    assert wait_until_gone([grandchild], timeout_s=0) == [grandchild]
    process.communicate("\n")
    assert wait_until_gone([grandchild, process.pid], timeout_s=60) == []
    assert resident_bytes([process.pid]) == 0
    assert bytes_read([process.pid]) is None
    assert cpu_ns([process.pid]) == 0
