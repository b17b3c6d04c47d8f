"""Many ranks at once, in processes of their own: the same answer, progress per file, and a word when one dies."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from headrace.errors import FormatError, HeadraceError
from headrace.traces import analyze, reading, to_document
from headrace.traces.discover import discover
from headrace.traces.reading import read_inputs

from .kineto_files import gloo_job


@pytest.fixture
def in_workers(monkeypatch):
    monkeypatch.setattr(reading, "IN_PROCESS_BELOW_BYTES", 0)


def test_workers_give_what_one_process_gives(tmp_path, in_workers, watchdog):
    job = gloo_job(tmp_path / "job", {0: 0, 1: 0, 2: 40, 3: 0})
    together, alone = (to_document(analyze([job], workers=workers)) for workers in (2, 1))
    assert together == alone
    assert together["slow_rank"]["rank"] == 2


def test_progress_is_told_per_file_from_the_calling_thread(tmp_path, in_workers, watchdog):
    told = []
    job = gloo_job(tmp_path / "job", dict.fromkeys(range(3), 0))
    analyze(
        [job], workers=2, progress=lambda entry, done, total: told.append((done, total, threading.current_thread()))
    )
    assert [(done, total) for done, total, _ in told] == [(1, 3), (2, 3), (3, 3)]
    assert {thread for _, _, thread in told} == {threading.main_thread()}


def test_an_error_in_a_worker_is_the_same_error(tmp_path, in_workers, watchdog):
    job = gloo_job(tmp_path / "job", {0: 0, 1: 0})
    (job / "rank_1.json").write_text('{"traceEvents": [{"ph": "X", ' + '"a": 1,' * 10)
    inputs = discover([job]).inputs
    (job / "rank_1.json").write_text("{}")
    with pytest.raises(FormatError, match=r"rank_1\.json is no trace"):
        read_inputs(inputs, workers=2)


def test_a_worker_that_dies_names_its_file_and_none_is_left(tmp_path, in_workers, watchdog, monkeypatch):
    job = gloo_job(tmp_path / "job", {0: 0, 1: 0})
    started = []

    def die_on_the_job():
        code = "import os, sys; sys.stdin.buffer.read(1); os._exit(9)"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        return process

    monkeypatch.setattr(reading, "_start_worker", die_on_the_job)
    with pytest.raises(HeadraceError, match=r"rank_\d\.json died \(exit status 9\)"):
        read_inputs(discover([job]).inputs, workers=2)
    assert all(process.poll() is not None for process in started)


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path, watchdog):
    job = gloo_job(tmp_path / "job", {0: 0, 1: 0})
    script = tmp_path / "script.py"
    script.write_text(
        "import headrace.traces.reading as reading\n"
        "from headrace.traces import analyze\n"
        "from pathlib import Path\n"
        "reading.IN_PROCESS_BELOW_BYTES = 0\n"
        "print('running')\n"
        f"print(analyze([Path({str(job)!r})], workers=2).slow_rank.verdict)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "running\nnone\n"
    assert done.stderr == ""


def test_small_jobs_are_read_without_starting_anything(tmp_path, monkeypatch):
    def refuse():
        raise AssertionError("a process was started for a few kilobytes")

    monkeypatch.setattr(reading, "_start_worker", refuse)
    assert analyze([gloo_job(tmp_path / "job", {0: 0, 1: 0})]).slow_rank.verdict == "none"
