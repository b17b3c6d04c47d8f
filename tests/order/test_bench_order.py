"""The bench of the order: raw values kept, ratios from them, and equal work on both sides."""

import json
from itertools import count

import numpy as np
import pytest

from headrace.bench import order as bench
from headrace.errors import ConfigError, HeadraceError


def test_the_record_holds_raw_values_and_ratios_that_follow_from_them() -> None:
    pytest.importorskip("megatron.core.datasets.helpers", reason="needs megatron-core 0.16.1")
    ticks = count()
    record = bench.run(
        num_documents=300,
        sequence_lengths=(64, 4096),
        num_rounds=6,
        num_warmup_rounds=1,
        num_drawn_samples=50,
        clock=lambda: next(ticks) ** 2 * 1000,  # every span differs, so a mix-up of values would show
    )
    json.dumps(record)
    rows = {(row["what"], row["contender"], row["sequence_length"]): row for row in record["rows"]}
    assert len(rows) == 2 * 2 * 2 + 2
    for row in rows.values():
        assert (len(row["values_us"]), len(row["warmup_us"])) == (6, 1)
        assert row["median_us"] == np.median(row["values_us"])
        if row["what"] == "drawing":
            assert (row["num_corpora"], row["num_samples"], row["num_documents"]) == (20, 50, None)
        else:
            assert row["num_documents"] / row["num_samples"] == row["documents_per_sample"]
    for name, what, length in (
        ("helper_over_headrace", "sample_index", 4096),
        ("megatron_over_headrace", "whole", 4096),
        ("drawing_helper_over_headrace", "drawing", None),
    ):
        medians = [rows[what, contender, length]["median_us"] for contender in ("megatron", "headrace")]
        assert record["summary"][name] == medians[0] / medians[1]
        low, high = record["summary"][f"{name}_interval"]
        assert low <= record["summary"][name] <= high
    assert record["skipped"] == {}


def test_without_megatron_the_record_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(bench, "import_module", missing)
    record = bench.run(num_documents=300, sequence_lengths=(64,), num_rounds=1)
    assert {row["contender"] for row in record["rows"]} == {"headrace"}
    assert record["summary"]["sequence_length"] == 64, "4096 did not run"
    assert record["summary"]["helper_over_headrace"] is None
    assert "pip install headrace[bench]" in record["skipped"]["megatron"]


def test_unequal_results_end_the_bench() -> None:
    contenders = {"one": lambda: (np.zeros(2),), "other": lambda: (np.ones(2),)}
    with pytest.raises(HeadraceError, match="one and other built different index arrays"):
        bench._take_turns(contenders, 1, lambda: 0)


def test_sizes_that_mean_nothing() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        bench.run(num_documents=0)
