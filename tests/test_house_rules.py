"""Rules of the house that a machine can check. The floors are import-linter's (`make check`)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

SOURCE = Path(headrace.__file__).parent
BANNED = {"utils", "util", "helpers", "helper", "common", "misc", "base", "core", "manager"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def modules() -> list[Path]:
    return [path for path in SOURCE.rglob("*.py") if "__pycache__" not in path.parts]


def test_every_module_is_named_for_one_job_and_stays_readable() -> None:
    for path in modules():
        assert path.stem.strip("_") not in BANNED, path
        assert len(path.read_text().splitlines()) <= MAX_FILE_LINES, path


def test_functions_fit_a_screen() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {length} lines"


def test_every_module_says_what_it_is_for() -> None:
    for path in modules():
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_public_names_are_exactly_these() -> None:
    assert headrace.__all__ == sorted(headrace.__all__), "sorted, for whoever reads it"
    assert set(headrace.__all__) == set(headrace._HOME_OF)
    for name in headrace.__all__:
        assert getattr(headrace, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = headrace.no_such_name


def test_importing_the_package_brings_no_framework() -> None:
    script = (
        "import sys, headrace, headrace.cli.app\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'altair', 'pandas', 'torch_npu'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_measuring_loads_nothing_of_the_feed() -> None:
    script = (
        "import sys, headrace.measure, headrace.torch.measure\n"
        "rooms = ('headrace.feed', 'headrace.shm', 'headrace.packing', 'headrace.order', 'headrace.store')\n"
        "feed = {name for name in sys.modules if name.startswith(rooms)}\n"
        "assert not feed, feed\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
