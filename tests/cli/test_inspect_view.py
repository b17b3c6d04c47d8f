"""`headrace inspect --sample ... --cp-size 2 --stage first`: what one rank takes, printed and in the document."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from headrace.cli import main
from headrace.store import StoreWriter


@pytest.fixture
def prefix(tmp_path):
    with StoreWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add_document(list(range(1, 10)))
    return str(tmp_path / "corpus")


def headrace(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
    monkeypatch.setenv("COLUMNS", "160")
    try:
        main()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def test_a_part_of_a_first_stage(prefix, tmp_path, monkeypatch, capsys):
    arguments = ("--sample", "0", "--seq-length", "8", "--cp-size", "2", "--cp-rank", "1", "--stage", "first")
    assert headrace(monkeypatch, "inspect", prefix, *arguments, "--json", str(tmp_path / "out.json")) == 0
    printed = capsys.readouterr().out
    assert "3 4 5 6" in printed
    view = json.loads((tmp_path / "out.json").read_text())["view"]
    assert list(view["fields"]) == ["tokens", "position_ids", "cu_seqlens", "cu_seqlens_padded"]
    assert view["fields"]["tokens"] == {"dtype": "int64", "shape": [1, 4], "values": [[3, 4, 5, 6]]}
    assert view["max_seqlen"] == 8


def test_without_a_view_there_is_none_and_a_wrong_one_is_a_sentence(prefix, tmp_path, monkeypatch, capsys):
    arguments = ("inspect", prefix, "--sample", "0", "--seq-length", "8")
    assert headrace(monkeypatch, *arguments, "--json", str(tmp_path / "out.json")) == 0
    assert "view" not in json.loads((tmp_path / "out.json").read_text())
    assert headrace(monkeypatch, *arguments, "--cp-size", "3", "--cut", "rows") == 2
    assert "multiple of 2 * cp_size = 6, got 8" in capsys.readouterr().err
    assert headrace(monkeypatch, *arguments, "--stage", "end") == 2
