"""Every test here runs under a watchdog and leaves nothing behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .company import Company


@pytest.fixture(autouse=True)
def guarded(watchdog: None, nothing_left: None) -> None:
    """See tests/conftest.py."""


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """`make soak` ends in one line."""
    if config.getoption("markexpr") == "soak":
        passed, failed = (len(terminalreporter.stats.get(key, [])) for key in ("passed", "failed"))
        failed += len(terminalreporter.stats.get("error", []))
        word = "GOOD" if passed and not failed else "BAD"
        terminalreporter.write_line(f"SOAK VERDICT: {word}, {passed} passed, {failed} failed")
