"""The whole demo, small: from a folder of text to the document, the table and the traces, and nothing left behind."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.store import standard_library
from tests.demo.launched import LaunchedDemo

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

STEPS, SEQ_LENGTH, TP, SLOW_RANK = 3, 128, 2, 1
TOKEN_BYTES, PREFETCHED_BATCHES = 2, 8
FEED_KEYS = {
    "get_batch_ms", "step_ms", "tokens_per_s", "tokens_per_day", "host_rss_mb", "bytes_read", "cpu_s", "phases_ms",
}  # fmt: skip


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("demo")
    text = folder / "text"
    shutil.copytree(standard_library() / "json", text, ignore=shutil.ignore_patterns("__pycache__"))
    demo = LaunchedDemo(
        folder,
        *("--text", str(text), "--steps", str(STEPS), "--seq-length", str(SEQ_LENGTH), "--tp", str(TP)),
        *(
            "--json",
            str(folder / "out.json"),
            "--trace",
            str(folder / "traces"),
            "--slow-rank",
            str(SLOW_RANK),
            "--slow-ms",
            "300",
        ),
    )
    code, out, error = demo.finish()
    assert code == 0, error
    document = json.loads((folder / "out.json").read_text())
    return {"demo": demo, "document": document, "out": out, "error": error, "traces": folder / "traces"}


def test_the_document_has_the_published_form(outcome: dict[str, Any]) -> None:
    document = outcome["document"]
    assert (document["version"], document["tp"], document["steps"], document["model"]) == (1, TP, STEPS, "llama")
    assert document["corpus"]["documents"] == 5
    assert document["corpus"]["tokens"] > SEQ_LENGTH
    assert document["seq_length"] == SEQ_LENGTH
    assert document["environment"]["backend"] == "gloo"
    assert set(document["feeds"]) == {"broadcast", "replicated", "headrace"}
    for feed in document["feeds"].values():
        assert set(feed) == FEED_KEYS
        assert len(feed["get_batch_ms"]["values"]) == STEPS
        assert 0 < feed["get_batch_ms"]["median"] <= feed["get_batch_ms"]["p99"]
        assert feed["tokens_per_day"] == pytest.approx(feed["tokens_per_s"] * 86_400)
        assert feed["cpu_s"] > 0


def test_every_rank_got_the_same_bytes_and_losses_from_every_feed(outcome: dict[str, Any]) -> None:
    document = outcome["document"]
    assert document["identical_batches"] is True
    assert document["identical_losses"] is True
    assert len(document["losses"]) == STEPS
    assert document["losses"][-1] < document["losses"][0]


def test_the_comparison_follows_from_the_figures(outcome: dict[str, Any]) -> None:
    document = outcome["document"]
    broadcast, headrace = document["feeds"]["broadcast"], document["feeds"]["headrace"]
    get_batch, step = broadcast["get_batch_ms"]["median"], broadcast["step_ms"]["median"]
    assert document["get_batch_reduction"] == pytest.approx(1 - headrace["get_batch_ms"]["median"] / get_batch)
    assert document["realised_share"] == document["get_batch_reduction"]
    assert document["possible_gain"] == pytest.approx(step / (step - get_batch) - 1)
    gain = document["throughput_gain"]
    assert gain["value"] == pytest.approx(headrace["tokens_per_s"] / broadcast["tokens_per_s"] - 1)
    assert gain["low"] <= gain["value"] <= gain["high"]
    assert gain["verdict"] in ("better", "worse", "cannot tell")


def test_one_reader_reads_each_token_once_and_replicas_read_it_once_each(outcome: dict[str, Any]) -> None:
    feeds, sample_bytes = outcome["document"]["feeds"], (SEQ_LENGTH + 1) * TOKEN_BYTES
    assert abs(feeds["headrace"]["bytes_read"] - STEPS * sample_bytes) <= PREFETCHED_BATCHES * sample_bytes
    assert feeds["replicated"]["bytes_read"] > feeds["broadcast"]["bytes_read"]


def test_memory_is_that_of_the_processes_a_feed_needs(outcome: dict[str, Any]) -> None:
    """Two workers, two workers per rank, one feeder: none of them is free."""
    megabytes = {name: feed["host_rss_mb"] for name, feed in outcome["document"]["feeds"].items()}
    assert megabytes["replicated"] > megabytes["broadcast"] > 10
    assert megabytes["headrace"] > 10


def test_the_table_names_every_feed_and_what_is_the_same(outcome: dict[str, Any]) -> None:
    for text in ("broadcast", "replicated", "headrace", "get_batch, p99 ms", "tokens/day", "byte for byte: yes"):
        assert text in outcome["out"]
    assert f"traces of 2 ranks in {outcome['traces']}; next: headrace analyze {outcome['traces']}" in outcome["out"]
    assert "Traceback" not in outcome["error"]


def test_without_a_terminal_each_phase_is_a_line(outcome: dict[str, Any]) -> None:
    phases = ["corpus: train", "corpus: tokenise", "load the model"]
    phases += [f"train from one seed, fed by {name}" for name in ("broadcast", "replicated", "headrace")]
    phases += ["every feed delivers every batch", "blocks of one feed each", "write traces"]
    assert [line for line in outcome["error"].splitlines() if line.startswith("demo: ")] == [
        f"demo: {phase}" for phase in phases
    ]


def test_each_rank_wrote_a_trace_of_real_steps(outcome: dict[str, Any]) -> None:
    for rank in range(TP):
        with gzip.open(outcome["traces"] / f"rank{rank}.pt.trace.json.gz") as file:
            trace = json.load(file)
        names = [event["name"] for event in trace["traceEvents"] if "name" in event]
        assert trace["distributedInfo"]["rank"] == rank
        assert {"data", "forward", "backward", "optimizer"} <= set(names)
        assert len({name for name in names if name.startswith("ProfilerStep#")}) == 6
        assert any("all_reduce" in name for name in names)


def test_the_planted_rank_is_found_in_the_traces(outcome: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from headrace.cli import main; main()", "analyze", str(outcome["traces"])]
    subprocess.run([*command, "--json", str(tmp_path / "verdict.json")], check=True, capture_output=True)
    assert json.loads((tmp_path / "verdict.json").read_text())["slow_rank"]["rank"] == SLOW_RANK


def test_nothing_is_left_but_the_corpus_for_the_next_run(outcome: dict[str, Any]) -> None:
    demo: LaunchedDemo = outcome["demo"]
    assert demo.leftovers() == []
    assert [path.name for path in demo.cache.glob("headrace/corpora/*/corpus.bin")] == ["corpus.bin"]
