"""Folders of killed runs go with the next start; all others stay."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.demo.run_folder import LOCK_FILE, PREFIX, run_folder

HOLDER = """
from headrace.demo.run_folder import run_folder
with run_folder() as folder:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_text("large")
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def another_run(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_killed_run_s_folder_goes_with_the_next_start_and_a_live_one_stays(temporary: Path) -> None:
    with another_run(temporary) as (killed, left), another_run(temporary) as (_, in_use):
        assert (left / "model" / "weights").read_text() == "large"
        killed.kill()
        killed.wait()
        assert left.is_dir()
        with run_folder() as own:
            assert set(temporary.iterdir()) == {own, in_use}
        assert (in_use / "model" / "weights").exists()
        assert not own.exists()


def test_what_is_no_run_s_folder_is_left_alone(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK_FILE).write_text("")
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    (temporary / f"{PREFIX}begun").mkdir()
    (temporary / f"{PREFIX}file").write_text("")
    before = sorted(temporary.rglob("*"))
    with run_folder():
        pass
    assert sorted(temporary.rglob("*")) == before


def test_a_run_that_fails_leaves_no_folder(temporary: Path) -> None:
    with pytest.raises(RuntimeError), run_folder():
        raise RuntimeError
    assert list(temporary.iterdir()) == []
