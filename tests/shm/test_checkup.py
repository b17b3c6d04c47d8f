"""`headrace doctor`: on this machine, on fake ones, and under limits that are really there."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.shm import checkup
from headrace.shm.checkup import Finding, check_all


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_this_machine_carries_a_ring_and_nothing_is_left_of_the_trial() -> None:
    findings = check_all()
    assert by_name(findings)["ring"].status == "good"
    assert not [finding for finding in findings if finding.status == "bad"]
    assert all(finding.change for finding in findings if finding.status != "good"), "whoever complains says what to do"


def test_an_old_kernel_is_a_note_and_a_blind_one_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "open_pidfd", lambda pid: None)
    assert by_name(list(checkup._check_pidfd()))["pidfd"].status == "note"
    monkeypatch.setattr(checkup, "start_time", lambda pid: 0)
    (finding,) = checkup._check_pidfd()
    assert finding.status == "bad"
    assert "pidfd_open" in finding.change


@pytest.mark.parametrize(("files", "quota"), [
    ({"cpu.max": "150000 100000"}, 1.5),
    ({"cpu.max": "max 100000"}, None),
    ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ({}, None),
])  # fmt: skip
def test_a_share_of_the_cores_is_seen(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        target = tmp_path / "sys/fs/cgroup" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")
    assert checkup._cpu_quota(tmp_path) == quota
    finding = by_name(list(checkup._check_cores(tmp_path)))["cores"]
    assert ("two cores" in finding.change) == (quota is not None or len(os.sched_getaffinity(0)) < 2)


def run_doctor(folder: Path, **popen: Callable[[], None]) -> tuple[int, str, dict[str, object]]:
    target = folder / "doctor.json"
    command = [sys.executable, "-c", "from headrace.cli import main; main()", "doctor", "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **popen)  # type: ignore[call-overload]
    assert done.stderr == ""
    return done.returncode, done.stdout, json.loads(target.read_text())


def test_the_verb_prints_what_it_writes(tmp_path: Path) -> None:
    status, output, document = run_doctor(tmp_path)
    assert (status, document["version"], document["kind"]) == (0, 1, "doctor")
    assert document["verdict"] in ("good", "note")
    findings = document["findings"]
    assert isinstance(findings, list)
    assert {"ring", "pidfd", "memory", "cores", "NUMA", "kernel", "python", "RLIMIT_MEMLOCK"} <= {
        f["name"] for f in findings
    }
    assert "a batch went through" in output
    assert "environment" in document


def test_a_machine_that_cannot_is_told_so(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 * 1024, 256 * 1024))

    status, output, document = run_doctor(tmp_path, preexec_fn=limit)
    assert (status, document["verdict"]) == (1, "bad")
    assert "RLIMIT_FSIZE" in output
    assert "No feed can run here" in output
