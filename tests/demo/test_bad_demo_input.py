"""What a user can get wrong is one sentence with the number, the limit and the knob, before any rank starts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import _native
from headrace.cli.demo import demo
from headrace.demo.corpus import existing, find_corpus, source_of
from headrace.demo.run import make_folder, require_packages
from headrace.demo.settings import DemoSettings
from headrace.errors import ConfigError, FormatError
from headrace.store import StoreWriter
from tests.demo.conftest import EOD, VOCAB_SIZE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_length": 0}, "seq_length must be at least 1, got 0"),
        ({"micro_batch_size": -1}, "micro_batch_size must be at least 1, got -1"),
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"model": "bert"}, "model must be llama or moe, got 'bert'"),
        ({"slow_rank": 1}, "name a folder with --trace"),
        ({"slow_rank": 2, "trace_dir": "t"}, "one of the 2 ranks 0 to 1, got 2"),
        ({"slow_ms": 0.0}, "slow_ms must be a positive number, got 0"),
        ({"slow_ms": -1.0}, "slow_ms must be a positive number, got -1"),
        ({"slow_ms": float("nan")}, "slow_ms must be a positive number, got nan"),
        ({"slow_ms": float("inf")}, "slow_ms must be a positive number, got inf"),
        ({"slow_ms": 1e300}, "slow_ms must be at most 60000"),
        ({"tp": 129}, "tp must be at most 128, got 129"),
        ({"seed": -1}, r"seed must lie in \[0, 4294967295\], got -1"),
        ({"seed": 2**32}, r"seed must lie in .*, got 4294967296"),
        ({"steps": 10**12}, r"1,000,000,000,000 steps .* at most 1,000,000 .*; lower steps or micro_batch_size"),
        ({"micro_batch_size": 10**12}, "at most 1,000,000 are kept in order; lower steps or micro_batch_size"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DemoSettings(**settings)


def test_the_limits_themselves_are_allowed() -> None:
    assert (
        DemoSettings(tp=_native.MAX_READERS, seed=2**32 - 1, slow_ms=60_000.0, steps=600_000).num_batches <= 1_000_000
    )


def test_a_corpus_shorter_than_one_sample_is_refused(prefix: str) -> None:
    corpus = existing(prefix)
    longest = DemoSettings(seq_length=corpus.tokens - 1)
    assert source_of(corpus, longest).open_batches()
    with pytest.raises(ConfigError, match=rf"needs {corpus.tokens + 1:,} tokens, the corpus .* has {corpus.tokens:,}"):
        source_of(corpus, DemoSettings(seq_length=corpus.tokens))


def test_corpora_that_are_none_are_refused(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no token store"):
        find_corpus(prefix=str(tmp_path / "missing"), text_folder=None)
    with pytest.raises(ConfigError, match="either a corpus or a text folder"):
        find_corpus(prefix=prefix, text_folder=str(tmp_path))
    (tmp_path / "damaged.bin").write_bytes(b"")
    (tmp_path / "damaged.idx").write_bytes(b"no index at all" * 10)
    with pytest.raises(FormatError, match=r"damaged\.idx"):
        find_corpus(prefix=str(tmp_path / "damaged"), text_folder=None)
    with StoreWriter(tmp_path / "empty", "uint16") as writer:
        writer.add_document(np.array([], np.uint16))
    with pytest.raises(ConfigError, match="holds no token"):
        find_corpus(prefix=str(tmp_path / "empty"), text_folder=None)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(ConfigError, match="is no folder"):
        find_corpus(prefix=None, text_folder=str(tmp_path / "missing"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="has no file"):
        find_corpus(prefix=None, text_folder=str(empty))
    (empty / "picture").write_bytes(b"\x89PNG\0\xff")
    with pytest.raises(ConfigError, match="no readable text"):
        find_corpus(prefix=None, text_folder=str(empty))


def test_a_store_without_a_manifest_says_by_its_ids_how_large_the_vocabulary_is(
    prefix: str, documents: list[list[int]]
) -> None:
    corpus = existing(prefix)
    assert corpus.vocab_size == VOCAB_SIZE == 1 + max(map(max, documents))
    assert corpus.tokens == sum(map(len, documents))
    assert corpus.eod is None
    assert EOD == 0


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="traces cannot be written to"):
        make_folder(str(tmp_path / "file" / "traces"))


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.demo.run.find_spec", lambda name: None if name == "transformers" else object())
    with pytest.raises(ConfigError, match=r"needs transformers: pip install 'headrace\[demo\]'"):
        require_packages()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--corpus", "nowhere"], "no token store at 'nowhere'"),
        (["--seq-length", "0"], "seq_length must be at least 1"),
        (["--json", "no/such/folder/out.json"], "there is no folder no/such/folder"),
        (["--slow-ms", "nan", "--trace", "t", "--slow-rank", "0"], "slow_ms must be a positive number, got nan"),
    ],
)
def test_the_command_says_one_sentence_and_leaves_with_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from headrace.cli import main; main()", "demo", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


def test_the_command_and_the_settings_have_the_same_defaults() -> None:
    offered = {name: parameter.default for name, parameter in signature(demo).parameters.items()}
    settings = asdict(DemoSettings())
    assert {name: offered[name] for name in settings.keys() & offered.keys()} == {
        name: settings[name] for name in settings.keys() & offered.keys()
    }
    assert {"tp", "steps", "seq_length", "slow_ms", "seed"} <= settings.keys() & offered.keys()
