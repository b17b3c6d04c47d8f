"""`headrace inspect` end to end: what is printed, what the JSON says, and one sentence for every wrong use."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from headrace.cli import main
from headrace.store import StoreWriter, build_corpus
from headrace.store.bpe import train

DOCUMENTS = [[5, 6, 9], [7, 9], [9], [8, 4, 3, 9], [1] * 17]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with StoreWriter(tmp_path / "corpus", np.uint16) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    return str(tmp_path / "corpus")


def headrace(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    try:
        main()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


def test_counts_quantiles_and_histogram(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace(monkeypatch, "inspect", prefix, "--json", str(tmp_path / "out.json")) == 0
    printed = capsys.readouterr().out
    assert "5 documents, 27 tokens, uint16" in printed
    assert "token ids 1 to 9" in printed
    assert "tokens per sequence" in printed
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["version"] == 1
    assert (document["documents"], document["sequences"], document["tokens"]) == (5, 5, 27)
    assert {entry["quantile"]: entry["tokens"] for entry in document["length_quantiles"]}[0.5] == 3
    assert [(entry["from"], entry["below"], entry["sequences"]) for entry in document["length_histogram"]] == [
        (0, 2, 1),
        (2, 4, 2),
        (4, 8, 1),
        (8, 16, 0),
        (16, 32, 1),
    ]
    assert "sample" not in document


def test_a_packed_micro_batch_comes_apart_into_its_documents(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--sample", "1", "--seq-length", "8", "--micro-batch-size", "2", "--eod", "9", "--eod-mask-loss")
    assert headrace(monkeypatch, "inspect", prefix, *arguments, "--json", str(tmp_path / "out.json")) == 0
    printed = capsys.readouterr().out
    assert "samples 1 to 2 of 3" in printed
    assert "row 0: sample 1\n  tokens 0 - " in printed
    assert "5 documents, 27 tokens" in printed
    assert "tokens per sequence" not in printed, "nobody asked for the lengths"
    assert "token ids instead of text: there is no tokenizer.json" in printed
    sample = json.loads((tmp_path / "out.json").read_text())["sample"]
    ends = []
    for segment in sample["segments"]:
        row, begin, end = segment["row"], segment["begin"], segment["end"]
        offset = segment["offset"]
        tokens = DOCUMENTS[segment["document"]][offset : offset + end - begin]
        assert sample["tokens"][row][begin:end] == tokens
        assert sample["position_ids"][row][begin:end] == list(range(end - begin))
        assert sample["loss_mask"][row][begin:end] == [int(token != 9) for token in tokens]
        assert segment["num_targets"] == sum(sample["loss_mask"][row][begin:end])
        assert segment["shown"].startswith(str(tokens[0]))
        ends.append(row * 8 + end)
    assert sample["cu_seqlens"] == [0, *ends]
    assert sample["max_seqlen"] == max(np.diff(sample["cu_seqlens"]))
    assert sample["num_targets"] == sum(map(sum, sample["loss_mask"]))
    assert f"cu_seqlens {sample['cu_seqlens']}" in printed
    for tokens, labels in zip(sample["tokens"], sample["labels"], strict=True):
        assert tokens[1:] == labels[:-1]


def test_text_is_shown_where_a_tokenizer_lies_beside_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra demo")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.py").write_text("wheel = 'turns'  # \x1b[31m\n")
    build_corpus(tmp_path / "texts", tmp_path / "corpus", vocab_size=260)
    assert headrace(monkeypatch, "inspect", str(tmp_path / "corpus"), "--sample", "0", "--seq-length", "20") == 0
    printed = capsys.readouterr().out
    assert r"wheel = 'turns'  # \x1b[31m"[:20] in printed
    assert "\x1b[31m" not in printed, "a document must not command the terminal"
    assert "token ids instead of text" not in printed


def test_what_prepare_leaves_is_found_and_not_taken_for_that_of_another_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra prepare")
    (tmp_path / "a.txt").write_text("the wheel turns the mill " * 9)
    (tmp_path / "tokenizer.json").write_text(train(["the wheel turns the mill"], vocab_size=270).to_json())
    made = ("prepare", str(tmp_path / "a.txt"), "-t", str(tmp_path / "tokenizer.json"), "--append-eod")
    shown = ("inspect", str(tmp_path / "a"), "--sample", "0", "--seq-length", "20", "--eod-mask-loss")
    assert headrace(monkeypatch, *made, "-o", str(tmp_path / "a"), "--processes", "1") == 0
    capsys.readouterr()
    assert headrace(monkeypatch, *shown) == 0
    assert "the wheel turns" in capsys.readouterr().out

    with StoreWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document(range(2, 50))
    assert headrace(monkeypatch, *shown) == 2
    assert "eod_mask_loss" in capsys.readouterr().err
    assert headrace(monkeypatch, *shown[:-1]) == 0
    assert "the manifest beside the store is that of another one" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"headrace {version('headrace')}\n"


def test_an_empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with StoreWriter(tmp_path / "empty", np.int32):
        pass
    assert headrace(monkeypatch, "inspect", str(tmp_path / "empty"), "--json", str(tmp_path / "out.json")) == 0
    assert "0 documents, 0 tokens, int32" in capsys.readouterr().out
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["lowest_token_id"] is None
    assert document["length_histogram"] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sample", "0"], "--sample and --seq-length belong together"),
        (["--seq-length", "8"], "--sample and --seq-length belong together"),
        (["--sample", "3", "--seq-length", "8"], "there are samples 0 to 2, asked for 1 from 3 on"),
        (["--sample", "0", "--seq-length", "8", "--micro-batch-size", "0"], "micro_batch_size must be at least 1"),
        (["--sample", "0", "--seq-length", "0"], "seq_length must be at least 1, got 0"),
        (["--sample", "0", "--seq-length", "8", "--order", "best"], "order must be one of megatron, elastic"),
        (
            ["--sample", "0", "--seq-length", "27"],
            "one sample needs 28 tokens, this part of the corpus holds 27 (documents: 5)",
        ),
        (["--sample", "0", "--seq-length", "8", "--eod-mask-loss"], "eod"),
        (["--json", "/nowhere/out.json"], "/nowhere/out.json cannot be written: there is no folder /nowhere"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(
    prefix: str,
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert headrace(monkeypatch, "inspect", prefix, *arguments) == 2
    printed, errors = capsys.readouterr()
    assert printed == "", "the histogram of a large store is not the answer to a wrong question"
    assert errors.startswith("ConfigError: ")
    assert sentence in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("order", ["megatron", "elastic"])
def test_a_blend_says_which_corpus_a_document_is_of(
    prefix: str, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with StoreWriter(tmp_path / "other", np.int32) as writer:
        writer.add_document(range(100, 160))
    blend = ("inspect", "1", prefix, "3", str(tmp_path / "other"))
    asked = ("--sample", "0", "--seq-length", "8", "--micro-batch-size", "4", "--num-samples", "8", "--order", order)
    assert headrace(monkeypatch, *blend, *asked, "--json", str(tmp_path / "out.json")) == 0
    printed = capsys.readouterr().out
    document = json.loads((tmp_path / "out.json").read_text())
    assert [(one["weight"], one["tokens"]) for one in document["corpora"]] == [(1.0, 27), (3.0, 60)]
    rows = document["sample"]["tokens"]
    segments = document["sample"]["segments"]
    assert {segment["corpus"] for segment in segments} == {0, 1}
    for segment in segments:
        assert (rows[segment["row"]][segment["begin"]] >= 100) == (segment["corpus"] == 1)
    assert "corpus 1, document 0 from" in printed
    assert f"corpus 0, weight 1: {prefix}\n" in printed
    for corpus in range(2):
        own = sorted({segment["row"] for segment in segments if segment["corpus"] == corpus})
        assert f"corpus {corpus}: in samples {', '.join(map(str, own))}\n" in printed
    assert headrace(monkeypatch, *blend, "--sample", "0", "--seq-length", "8") == 2
    assert "ends nowhere by itself: give num_samples" in capsys.readouterr().err
    assert headrace(monkeypatch, "inspect", "1", prefix, "0", str(tmp_path / "other")) == 2
    assert "must be a number above 0, got 0.0" in capsys.readouterr().err


def test_targets_and_whole_documents(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with StoreWriter(tmp_path / "learnt", np.int32) as writer:
        for document in DOCUMENTS:
            writer.add_document([token if token % 2 else -100 for token in document])
    asked = ("--sample", "0", "--seq-length", "8", "--micro-batch-size", "4", "--documents", "whole")
    arguments = ("inspect", prefix, *asked, "--targets", str(tmp_path / "learnt"), "--json", str(tmp_path / "out.json"))
    assert headrace(monkeypatch, *arguments) == 0
    sample = json.loads((tmp_path / "out.json").read_text())["sample"]
    parts = [(segment["document"], segment["offset"]) for segment in sample["segments"]]
    assert sorted(parts) == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (4, 8)]
    learnt = [
        label
        for row, mask in zip(sample["labels"], sample["loss_mask"], strict=True)
        for label, counts in zip(row, mask, strict=True)
        if counts
    ]
    assert sorted(learnt) == sorted([9, 9, 3, 9] + [1] * 16)
    assert sum(segment["num_targets"] for segment in sample["segments"]) == len(learnt) == sample["num_targets"]


def test_a_damaged_store_is_one_sentence_and_exit_code_2(
    prefix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(f"{prefix}.bin").write_bytes(b"")
    assert headrace(monkeypatch, "inspect", prefix) == 2
    assert capsys.readouterr().err == (
        f"FormatError: {prefix}.bin is too short: {prefix}.idx needs 54 bytes, it has 0\n"
    )
