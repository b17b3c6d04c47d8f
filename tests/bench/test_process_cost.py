"""The kernel's numbers about other processes are the right ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bench import process_cost

# Spins or sleeps as it is told, one word per line, and says when it has begun.
OBEDIENT = """
import sys, mmap, time
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    if word == "spin":
        end = time.process_time() + float(rest)
        while time.process_time() < end: pass
    elif word == "touch":
        kept = mmap.mmap(-1, int(rest)); kept.write(b"x" * int(rest))
    elif word == "read":
        open(rest, "rb", buffering=0).read()
    elif word == "child":
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        print(child.pid, flush=True)
        continue
    print("done", flush=True)
"""


class Obedient:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OBEDIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        self.tell("ready")

    def tell(self, words: str) -> str:
        self.begin(words)
        return self.process.stdout.readline().strip()

    def begin(self, words: str) -> None:
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()


@pytest.fixture
def other() -> Iterator[Obedient]:
    obedient = Obedient()
    yield obedient
    process_cost.resume([obedient.pid])
    obedient.process.kill()
    obedient.process.communicate()


def test_cpu_seconds_are_those_of_the_process(other):
    before = process_cost.cpu_s(other.pid)
    other.tell("spin 0.05")
    used = process_cost.cpu_s(other.pid) - before
    assert used >= 0.05
    own = process_cost.cpu_s(os.getpid())
    assert own == pytest.approx(time.process_time(), abs=0.01)


def test_a_process_that_is_gone_costs_nothing(other):
    other.process.kill()
    other.process.wait()
    assert process_cost.cpu_s(other.pid) == 0.0
    assert process_cost.bytes_read(other.pid) == 0
    assert process_cost.private_and_shared_bytes([other.pid]) == 0


def test_memory_counts_what_is_touched(other):
    before = process_cost.private_and_shared_bytes([other.pid])
    other.tell(f"touch {32 << 20}")
    assert 32 << 20 <= process_cost.private_and_shared_bytes([other.pid]) - before < 80 << 20


def test_bytes_read_come_from_read(other, tmp_path: Path):
    (tmp_path / "data").write_bytes(bytes(300_000))
    before = process_cost.bytes_read(other.pid)
    other.tell(f"read {tmp_path / 'data'}")
    assert 300_000 <= process_cost.bytes_read(other.pid) - before < 310_000


def test_descendants_are_children_and_theirs(other):
    grandchild = int(other.tell("child"))
    found = process_cost.descendants(os.getpid())
    assert {other.pid, grandchild} <= found
    assert os.getpid() not in found
    assert process_cost.descendants(other.pid) == {grandchild}


def test_a_paused_process_stands_still_and_goes_on(other):
    other.begin("spin 0.2")
    process_cost.pause([other.pid])
    while Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    stopped_at = process_cost.cpu_s(other.pid)
    time.sleep(0.05)  # what must not move has time to
    assert process_cost.cpu_s(other.pid) == stopped_at
    process_cost.resume([other.pid])
    assert other.process.stdout.readline().strip() == "done"
    process_cost.pause([2**22 + 1])  # nobody has this pid: nothing happens
