"""Both sides make the same fields; without a device its columns are empty and the record says why."""

from __future__ import annotations

import json
import sys
from itertools import count

import pytest

from headrace.bench import placement
from headrace.cli import main
from headrace.errors import ConfigError

FIELDS = {
    "labels", "loss_mask", "position_ids", "cu_seqlens", "tokens of 1 of 2 ranks", "tokens of depth 1", "all fields",
    "attention_mask",
}  # fmt: skip


def test_the_record_with_a_device():
    """The CPU stands in for one: what is checked is that the two sides agree, which run() itself does."""
    record = placement.run(
        seq_lengths=(300,), device="cpu", num_rounds=3, num_warmup_rounds=1, clock=count(step=2000).__next__
    )
    json.dumps(record)
    assert {row["field"] for row in record["rows"]} == FIELDS
    for row in record["rows"]:
        assert row["cpu_values_us"] == [2.0] * 3
        assert row["nbytes"] > 0
        if row["field"] != "all fields":
            assert row["device_us"] == row["copy_us"] == 2.0
    assert [row["field"] for row in record["rows"] if row["host_reads"]] == ["cu_seqlens"]
    assert record["summary"]["cpu_over_device"]["position_ids"] == 2.0
    assert record["summary"]["cpu_over_device"]["all fields"] is None


def test_the_verb(monkeypatch, capsys, tmp_path):
    path = tmp_path / "placement.json"
    arguments = ["--seq", "64", "--rounds", "2", "--device", "cpu", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["headrace", "bench", "placement", *arguments])
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "position_ids" in printed
    assert {row["field"] for row in json.loads(path.read_text())["rows"]} == FIELDS


def test_without_a_device(monkeypatch):
    monkeypatch.setattr(placement, "find_device", lambda wanted: (None, None, {"device": "none here"}))
    record = placement.run(seq_lengths=(9000,), num_rounds=2, num_warmup_rounds=0)
    assert record["skipped"] == {"device": "none here"}
    assert {row["field"] for row in record["rows"]} == FIELDS - {"attention_mask"}, "no mask of 81 MB"
    assert all(row["device_us"] is None and row["cpu_us"] > 0 for row in record["rows"])
    assert set(record["summary"]["cpu_over_device"].values()) == {None}


def test_a_disagreement_is_no_measurement(monkeypatch):
    monkeypatch.setattr(placement, "_positions", lambda torch, text, boundaries, eod: text[:-1])
    with pytest.raises(AssertionError, match="position_ids: the device and the CPU disagree"):
        placement.run(seq_lengths=(64,), device="cpu", num_rounds=1)


def test_a_device_that_is_not_there_and_sizes_that_measure_nothing():
    with pytest.raises(ConfigError, match="device 'tpu' cannot be used"):
        placement.run(seq_lengths=(64,), device="tpu")
    with pytest.raises(ConfigError, match="at least 1"):
        placement.run(seq_lengths=())
