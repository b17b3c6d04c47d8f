"""docs/traces.md: its example runs, and it knows every verdict and every rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from headrace.traces import judge
from headrace.traces.slow_rank import Verdict

from .kineto_files import gloo_job

TEXT = (Path(__file__).parents[2] / "docs" / "traces.md").read_text()


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    gloo_job(tmp_path / "traces", {0: 0, 1: 40, 2: 0})
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert capsys.readouterr().out.startswith("rank 1 is late by 40.0 ms per step")
    assert names["document"]["version"] == 1


def test_every_verdict_and_rule_is_explained():
    for verdict in get_args(Verdict):
        assert f"| `{verdict}` |" in TEXT
    for rule in judge(()).named_rules:
        assert f"| `{rule.name}` |" in TEXT
