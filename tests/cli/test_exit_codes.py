"""What ends a command, as its user sees it: one sentence and an exit code, or a traceback for a defect."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.cli import main
from headrace.cli.app import app
from headrace.cli.bench import finite, numbers
from headrace.cli.tune import check_device, memory_budget
from headrace.errors import ConfigError

NO_UTF8 = UnicodeDecodeError("utf-8", b"ab\xff", 2, 3, "invalid start byte")


def too_large() -> MemoryError:
    """What NumPy raises for an array of 8 EiB: a kind of MemoryError that says how much was asked for."""
    with pytest.raises(MemoryError) as caught:
        np.empty(2**60 - 1, np.int64)
    return caught.value


def run_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of `headrace doctor`, whose work raises `error`."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["headrace", "doctor"])
    doctor = next(command for command in app.registered_commands if command.name == "doctor")
    monkeypatch.setattr(doctor, "callback", fail)
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out"), "out: No space left on device; free some space"),
        (OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "aaa"), "aaa: File name too long; choose a sh"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), b"x"), "x: Permission denied; choose another place"),
        (OSError("without a number"), "OSError: without a number"),
        (MemoryError(), "MemoryError: not enough memory; ask for less"),
        (too_large(), "MemoryError: Unable to allocate 8.00 EiB"),
        (NO_UTF8, "no utf-8 text: byte 0xff at 2"),
    ],
)
def test_what_the_machine_refuses_is_one_sentence(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(error, monkeypatch) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert words in captured.err


def test_an_interrupt_ends_with_130_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(KeyboardInterrupt(), monkeypatch) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupt_before_a_verb_runs_ends_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.cli.app.app", interrupted)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130


def test_an_interrupt_of_the_imports_ends_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupt:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "headrace.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "headrace.cli.app")
    monkeypatch.delattr("headrace.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        run_with(ZeroDivisionError(), monkeypatch)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_under_the_output_is_said_once() -> None:
    command = [sys.executable, "-c", "from headrace.cli import main; main()", "--version"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "OSError: No space left on device; free some space there\n"


@pytest.mark.parametrize("memory_gib", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_budget_that_is_no_amount_of_memory_is_refused(memory_gib: float) -> None:
    with pytest.raises(ConfigError, match="--memory-gib must be a positive number, got"):
        memory_budget(memory_gib)


def test_a_budget_beyond_what_is_left_is_refused_with_what_is_left() -> None:
    with pytest.raises(ConfigError, match=r"--memory-gib asks for 1e\+15, but .* has [\d.]+ GiB left; lower it"):
        memory_budget(1e15)
    assert 0 < memory_budget(2**-20) == 1024
    assert memory_budget(None) > 0


@pytest.mark.parametrize("device", ["foo", "cuda:", "cuda:x", "cpu:-1", "", "cuda:0:1"])
def test_devices_that_are_none_are_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="--device is cpu, cuda or npu"):
        check_device(device)


def test_an_accelerator_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    check_device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"torch\.cuda finds no device"):
        check_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda:1")
    with pytest.raises(ConfigError, match="--device cuda:2 is not there: this machine has 2 of them"):
        check_device("cuda:2")


def test_numbers_of_an_option_are_finite() -> None:
    assert numbers("5,0.5", float, "--pace-ms") == (5.0, 0.5)
    assert finite(10**400, "--seq") == 10**400
    for text in ("nan", "5,inf", "-inf"):
        with pytest.raises(ConfigError, match="--pace-ms takes finite numbers, got"):
            numbers(text, float, "--pace-ms")
    with pytest.raises(ConfigError, match="--idle-s takes finite numbers, got nan"):
        finite(float("nan"), "--idle-s")
