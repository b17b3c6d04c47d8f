"""The commands under "Making a corpus" are run as they stand on the page, and make what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import PackedTokens

pytest.importorskip("tokenizers", reason="needs the extra prepare")

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_commands_make_a_corpus_that_the_readme_can_read(tmp_path: Path) -> None:
    section = PAGE.read_text().split("## Making a corpus")[1].split("\n## ")[0]
    commands = "\n".join(re.findall(r"```sh\n(.*?)```", section, flags=re.DOTALL))
    (tmp_path / "texts").mkdir()
    for number in range(4):
        text = "".join(f"wheel {number * i} turns the mill\n" for i in range(60))
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    (tmp_path / "texts" / "more.jsonl").write_text('{"text": "one line"}\n{"body": "no text"}\n')
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "more.jsonl, line 2: no key 'text'" in done.stdout
    assert "turns the mill" in done.stdout
    assert "chats.jsonl, line 3: nothing to learn: the assistant says nothing" in done.stdout
    learnt, num_tokens = map(int, re.findall(r"2 chats in a row, (\d+) of its (\d+) tokens are learnt", done.stdout)[0])
    assert 0 < learnt < num_tokens
    assert json.loads((tmp_path / "report.json").read_text())["num_bad"] == 1
    named = set(re.findall(r"`(corpus\.[a-z.]+)`", section))
    assert (tmp_path / "chats.targets.idx").exists()
    made = {file.name for file in tmp_path.glob("corpus.*")}
    assert made == named
    source = PackedTokens(str(tmp_path / "corpus"), seq_length=256, seed=1234)
    batch = next(iter(source.open_batches()))
    assert batch["tokens"].shape == (1, 256)
