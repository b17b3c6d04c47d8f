"""`headrace analyze` as a command: exit codes, files, one sentence for what goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.traces.ascend_files import Profile, write_text
from tests.traces.kineto_files import gloo_job


def analyze(*arguments):
    command = [sys.executable, "-c", "from headrace.cli import main; main()", "analyze", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={"COLUMNS": "120", "PATH": "/usr/bin:/bin"})


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return gloo_job(tmp_path_factory.mktemp("traces") / "job", {0: 0, 1: 0, 2: 40, 3: 0})


def test_a_folder_in_verdict_and_all_files_out(tmp_path, job):
    pytest.importorskip("altair")
    files = [tmp_path / name for name in ("a.json", "a.html", "a.perfetto.json")]
    done = analyze(job, "--json", files[0], "--html", files[1], "--perfetto", files[2], "--csv", tmp_path / "tables")
    assert done.returncode == 0, done.stderr
    headline, numbers = done.stdout.splitlines()[:2]
    assert headline.startswith("rank 2 is slow, because of its core or its work (confidence: ")
    assert numbers.startswith("  rank 2 is late by 40.0 ms per step")
    assert done.stderr == ""
    document = json.loads(files[0].read_text())
    assert document["slow_rank"]["rank"] == 2
    assert "date" in document
    assert files[1].read_text().startswith("<!doctype html>")
    assert json.loads(files[2].read_text())["traceEvents"]
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == [
        "cluster_step_trace_time.csv",
        "communication.csv",
        "communication_matrix.csv",
        "waits.csv",
    ]


def test_paths_may_be_given_one_by_one(tmp_path, job):
    path = tmp_path / "a.json"
    assert analyze(job / "rank_0.json", job / "rank_2.json", "--json", path).returncode == 0
    document = json.loads(path.read_text())
    assert document["ranks"] == [0, 2]
    assert document["slow_rank"]["verdict"] == "undecidable"


def test_groups_are_named_where_traces_do_not(tmp_path):
    for rank in range(2):
        write_text(tmp_path / f"rank{rank}_ascend_pt", Profile(rank=rank, all_reduce=(1300, 1000 - 900 * rank)))
    done = analyze(tmp_path, "--groups", "0,1")
    assert done.returncode == 0, done.stderr


def test_a_training_log_takes_what_it_cannot_know_from_the_command_line(tmp_path):
    path = tmp_path / "log.json"
    memory = [{"max allocated memory": 1.0}] * 8
    path.write_text(json.dumps({"time info": [13649.0, 5540.0, 5541.0, 5540.0], "memo info": memory}))
    done = analyze(path, "--tokens-per-step", 262144, "--flops-per-step", 2.9245e15)
    assert done.returncode == 0, done.stderr
    assert "47,318" in done.stdout
    assert "66.0" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nonexistent"], "does not exist"),
        ([], "Missing argument"),
        (["{job}", "--groups", "0,x"], "--groups takes ranks"),
        (["{job}", "--workers", "0"], "--workers must be at least 1"),
        (["{job}", "--json", "/nonexistent/a.json"], "there is no folder"),
        (["{job}", "--tokens-per-step", "5"], "go with a training log"),
        (["{empty}"], "is empty"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(tmp_path, job, arguments, said):
    empty = tmp_path / "empty"
    empty.mkdir()
    done = analyze(*(argument.format(job=job, empty=empty) for argument in arguments))
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
