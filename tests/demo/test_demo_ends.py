"""However a demo ends, it says why in a line, soon, and leaves nothing."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from headrace.demo.processes import wait_until_gone
from headrace.demo.progress import LINE_BEGIN
from headrace.demo.run_folder import run_folder
from tests.demo.launched import LaunchedDemo

pytest.importorskip("torch")
pytest.importorskip("transformers")

MANY_STEPS = ("--steps", "100000", "--seq-length", "64")


@pytest.fixture
def demo(tmp_path: Path, prefix: str) -> LaunchedDemo:
    return LaunchedDemo(tmp_path, "--corpus", prefix, *MANY_STEPS)


def said_of_the_end(error: str) -> list[str]:
    """Lines of standard error without those that named the phases."""
    return [line for line in error.splitlines() if line.strip() and not line.startswith(LINE_BEGIN)]


def test_a_killed_feeder_is_named_by_each_rank(demo: LaunchedDemo) -> None:
    feeder = demo.wait_for_feeder()
    os.kill(feeder, signal.SIGKILL)
    code, _, error = demo.finish()
    assert code == 1
    *lines, last = said_of_the_end(error)
    assert len(lines) == 2
    assert all(line.startswith("PeerGone: ") and f"(pid {feeder})" in line for line in lines)
    assert "failed with PeerGone" in last
    assert demo.leftovers() == []


def test_a_killed_rank_is_named(demo: LaunchedDemo) -> None:
    feeder = demo.wait_for_feeder()
    rank = int(Path(f"/proc/{feeder}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(rank, signal.SIGKILL)
    code, _, error = demo.finish()
    assert code == 1
    assert f"rank 0 (pid {rank}) was ended by SIGKILL" in error.splitlines()[-1]
    assert demo.leftovers() == []


def test_an_interrupt_ends_everything(demo: LaunchedDemo) -> None:
    demo.wait_for_feeder()
    demo.process.send_signal(signal.SIGINT)
    code, _, error = demo.finish()
    assert code != 0
    assert said_of_the_end(error) in ([], ["Aborted!"])
    assert demo.leftovers() == []


def test_a_killed_launcher_takes_everything_with_it_but_a_folder_for_the_next_run(
    demo: LaunchedDemo, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo.wait_for_feeder()
    alive = demo.processes()
    demo.process.kill()
    demo.finish()
    assert wait_until_gone(list(alive), timeout_s=60) == []
    (left,) = demo.leftovers()
    assert isinstance(left, Path)
    monkeypatch.setattr(tempfile, "tempdir", str(demo.temporary))
    with run_folder():
        assert not left.exists()
    assert demo.leftovers() == []
