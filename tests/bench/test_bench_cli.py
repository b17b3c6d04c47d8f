"""Each verb, as small as it goes, through the command line: it runs, and its document says what it must."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console

from headrace.bench import get_batch, megatron_dataset
from headrace.bench.corpus import choose_corpus, write_synthetic
from headrace.bench.get_batch import Plan, added_bytes, cases
from headrace.bench.get_batch_case import CONTENDERS, Case
from headrace.bench.get_batch_launch import launch
from headrace.bench.iceoryx2_ring import missing_reason
from headrace.cli import main
from headrace.cli.bench_tables import print_traces
from headrace.errors import HeadraceError
from headrace.store import StoreWriter

pytestmark = pytest.mark.usefixtures("watchdog", "nothing_left")

GET_BATCH_KEYS = {
    "contender", "tp", "micro_batch_size", "seq_length", "pace_ms", "group_median_us", "group_p99_us", "writer_cpu",
    "host_rss_mb",
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> str:
    prefix = str(tmp_path_factory.mktemp("corpus") / "synthetic")
    write_synthetic(prefix, num_tokens=30_000, seed=1)
    return prefix


class Ran(NamedTuple):
    exit_code: int
    output: str
    errors: str


@pytest.fixture
def headrace(monkeypatch, capsys) -> Callable[..., Ran]:
    """`headrace bench ...` in this process: its own start is not what costs, and is tested elsewhere."""

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["headrace", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = capsys.readouterr()
        return Ran(exit_code=ended.value.code, output=output, errors=errors)

    return run


@pytest.fixture
def document(headrace, tmp_path) -> Callable[..., tuple[dict[str, Any], str]]:
    """What a verb writes with --json, and what it shows."""

    def run(*arguments: str) -> tuple[dict[str, Any], str]:
        ran = headrace(*arguments, "--json", str(tmp_path / "out.json"))
        assert ran.exit_code == 0, ran.errors
        found = json.loads((tmp_path / "out.json").read_bytes())
        assert found["version"] == 1
        assert found["date"].startswith("20")
        assert found["environment"]["num_cores"] >= 1
        assert found["isolates"]
        return found, ran.output

    return run


def test_get_batch_of_all_contenders(document, corpus):
    found, shown = document(
        "get-batch", "--tp", "2", "--seq", "64", "--pace-ms", "1,0", "--steps", "6", "--blocks", "1", "--no-memory",
        "--corpus", corpus,
    )  # fmt: skip
    expected = set(CONTENDERS) - found["skipped"].keys()
    assert {(row["contender"], row["pace_ms"]) for row in found["rows"]} == {
        (name, pace) for name in expected for pace in (1.0, 0.0)
    }
    for row in found["rows"]:
        assert row.keys() >= GET_BATCH_KEYS
        assert (row["tp"], row["micro_batch_size"], row["seq_length"]) == (2, 1, 64)
        values = np.array(row["values_us"])
        assert values.shape == (1, 6)
        assert row["group_median_us"] == pytest.approx(np.median(values))
        assert (values > 0).all()
        assert np.array(row["lead_in_us"]).shape == (1, 8)
        assert row["writer_cpu"] >= 0
        assert row["num_background_processes"] == {"broadcast": 2, "megatron": 2, "replicated": 4}.get(
            row["contender"], 1
        )
    assert found["checked_batches"] == 8
    assert found["corpus"]["origin"] == "given"
    assert len(found["summary"]["ratios"]) == 2 * (len(expected) - 1)
    assert "compared byte for byte" in shown
    for name in expected:
        assert name in shown


@pytest.mark.parametrize(("hidden", "reason"), [(True, "not installed"), (False, "document 1 does not have 7")])
def test_megatrons_dataset_is_left_out_by_a_sentence(tmp_path, monkeypatch, hidden, reason):
    with StoreWriter(tmp_path / "endless", np.uint16) as writer:
        for last in (7, 8, 7):
            writer.add_document(np.array([1, 2, 3, last]))
    monkeypatch.setattr(
        megatron_dataset, "missing_reason", lambda: "megatron-core is not installed" if hidden else None
    )
    monkeypatch.setattr(get_batch, "cases", lambda *_: iter(()))
    assert reason in get_batch.run(str(tmp_path / "endless"))["skipped"]["megatron"]


def test_the_memory_of_a_contender_is_what_it_adds(corpus):
    plan = Plan(num_ranks=(1,), seq_lengths=(4096,), num_steps=1, num_blocks=1, num_slots=8)
    with choose_corpus(corpus) as chosen:
        (case,) = [added_bytes(case) for case in cases(plan, chosen, ("headrace",))]
    assert case["headrace"] > 8 * 28 * 4096  # the slots alone; the feeder's interpreter comes on top


def test_handover(document, corpus):
    found, shown = document(
        "handover", "--readers", "1", "--wakes", "8", "--hot", "32", "--after-gap", "16", "--idle-s", "0.5",
        "--corpus", corpus,
    )  # fmt: skip
    summary = found["summary"]
    for key in ("ready_hot_us", "ready_cold_us", "blocked_wake_ratio", "idle_cpu_fraction"):
        assert math.isfinite(summary[key]), key
        assert summary[key] > 0, key
    blocked = {(row["contender"], row["num_readers"]) for row in found["rows"] if row["kind"] == "blocked"}
    assert blocked >= {("futex", 1), ("ring", 1)}
    ready = {(row["contender"], row["state"]) for row in found["rows"] if row["kind"] == "ready"}
    assert ready >= {(name, state) for name in ("ring", "clock", "feed: next") for state in ("hot", "after_gap")}
    if missing_reason() is None:
        assert ("iceoryx2", 1) in blocked
    else:
        assert "iceoryx2" in found["skipped"]
    for row in found["rows"]:
        assert row["median_us"] == pytest.approx(np.median(row["values_ns"]) / 1e3)
    assert "bare futex" in shown


def test_pack_and_order(document, corpus, monkeypatch):
    # Ten seconds of imports that other tests have; what one of those has imported already must be hidden by its name.
    for name in ("megatron", *(name for name in sys.modules if name.startswith("megatron."))):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("headrace.bench.pack.WORKING_SET_BYTES", 1 << 20)
    found, shown = document("pack", "--seq", "64", "--rounds", "2", "--corpus", corpus)
    assert {row["text"] for row in found["rows"]} == {"corpus", "synthetic", "short"}
    assert "memcpy" in shown
    assert "without megatron" in shown
    assert found["summary"]["megatron_over_pack"] is None, "the document keeps its keys"
    assert "seq_length: 64\n" in shown
    assert ": None" not in shown
    found, shown = document(
        "order", "--seq", "64", "--rounds", "2", "--documents", "500", "--elastic-documents", "2000",
        "--drawn-samples", "300",
    )  # fmt: skip
    assert {row["what"] for row in found["rows"]} == {
        "sample_index", "whole", "drawing", "first batch at 2e+04 of 2e+05",
    }  # fmt: skip
    assert "None" not in shown.split("without megatron")[0], "what was not measured is left empty, or out"
    assert found["summary"]["helper_over_headrace"] is None
    assert found["summary"]["elastic_allocated_bytes"] < 200_000
    assert f"elastic_allocated_bytes: {found['summary']['elastic_allocated_bytes']}" in shown
    assert "without megatron" in shown


def test_balance(document, corpus):
    found, shown = document(
        "balance", "--seq", "64,256", "--data-size", "4", "--micro-batches", "4", "--hidden-size", "8", "--steps", "3",
        "--corpus", corpus,
    )  # fmt: skip
    assert [(row["text"], row["seq_length"], row["dealing"]) for row in found["rows"]] == [
        (text, seq_length, dealing)
        for text in ("given", "long-tailed")
        for seq_length in (64, 256)
        for dealing in ("stored", "balanced")
    ]
    for stored, balanced in zip(found["rows"][0::2], found["rows"][1::2], strict=True):
        assert stored["bounds"] == balanced["bounds"], "the same samples"
        for before, after, bound in zip(stored["spreads"], balanced["spreads"], stored["bounds"], strict=True):
            assert before >= after >= bound >= 1
        assert balanced["worst_spread"] == max(balanced["spreads"])
    assert found["summary"]["num_steps"] == 12
    (figure,) = found["summary"]["figures"]
    assert figure["reached"]
    assert figure["target"] == 1.05
    assert "of 12 balanced steps" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("get-batch", "--tp", "two"), "--tp takes numbers separated by commas, got 'two'"),
        (("get-batch", "--tp", "0"), "num_ranks must be one or more numbers of at least 1"),
        (("get-batch", "--pace-ms", "-1"), "paces_ms must be"),
        (("get-batch", "--steps", "2"), "num_blocks must lie in"),
        (("get-batch", "--contenders", "broadcast"), "contenders are headrace and any of"),
        (("handover", "--readers", "0"), "num_readers must be"),
        (("handover", "--idle-s", "0"), "idle_s must be positive"),
        (("get-batch", "--json", "/nowhere/out.json"), "there is no folder /nowhere"),
        (("get-batch", "--corpus", "/nowhere/corpus"), "no token store at '/nowhere/corpus'"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(headrace, arguments, sentence):
    done = headrace(*arguments)
    assert done.exit_code == 2
    assert sentence in done.errors
    assert "Traceback" not in done.errors


def test_a_rank_that_fails_is_told_with_its_last_words(tmp_path):
    case = Case(
        num_ranks=2, source={"prefix": "/nowhere/corpus", "seq_length": 64}, contenders=("headrace",), paces_ms=(),
        num_blocks=1, steps_per_block=1, lead_in_steps=0, num_slots=4, iceoryx2_place=None, folder=str(tmp_path),
    )  # fmt: skip
    with pytest.raises(HeadraceError, match="of the bench failed") as caught:
        launch(case, timeout_s=120.0)
    assert "no token store at '/nowhere/corpus'" in str(caught.value)


def test_without_a_prefix_a_corpus_is_found_or_made(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with choose_corpus(None, num_tokens=2_000) as made:
        assert made.origin == "synthetic"
        assert made.num_tokens >= 2_000
        assert Path(f"{made.prefix}.idx").exists()
    assert not Path(f"{made.prefix}.idx").exists()
    home = tmp_path / "headrace" / "corpora" / "some"
    home.mkdir(parents=True)
    write_synthetic(str(home / "corpus"), num_tokens=3_000, seed=2)
    with choose_corpus(None) as cached:
        assert cached.origin == "demo"
        assert cached.num_tokens >= 3_000


def test_the_table_of_traces_shows_who_took_how_long_and_what_was_missed():
    figure = {"what": "times faster", "target": 35.0, "value": 26.5, "reached_by": "at least", "reached": False}
    record = {
        "file_bytes": 54_000_000,
        "num_events": 216_000,
        "rows": [{"contender": "headrace", "median_s": 0.18, "p99_s": 0.19, "peak_bytes": 96_600_000}],
        "summary": {"hta_over_headrace": 26.5},
        "figures": [figure],
        "skipped": {"hta": "not installed"},
    }
    console = Console(record=True, width=100)
    print_traces(record, console)
    shown = console.export_text()
    for text in ("216,000 events", "0.18", "96.6", ">= 35", "26.5", "missed", "without hta: not installed"):
        assert text in shown


def test_without_an_accelerator_the_device_bench_says_so(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["headrace", "bench", "device", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "there is no device 'cpu' here" in capfd.readouterr().err


def test_the_device_bench_s_contenders_deliver_the_same(monkeypatch, corpus):
    """Its two ways to a batch, with the CPU in the device's place."""
    from headrace.bench.device import feed_batches, loaded_batches
    from headrace.feed.packed_tokens import PackedTokens

    source = PackedTokens(str(corpus), seq_length=64)
    ours, theirs = feed_batches(torch.device("cpu"), source), loaded_batches(torch.device("cpu"), source)
    for _ in range(3):
        one, other = next(ours), next(theirs)
        assert all(torch.equal(one[name], other[name]) for name in ("tokens", "labels", "position_ids", "cu_seqlens"))
    ours.close()
    theirs.close()
