"""A corpus is built once, by whoever is first, and never used when it is damaged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.store import TokenStore, cached_corpus
from headrace.store.corpus_cache import default_cache_dir

pytest.importorskip("tokenizers", reason="needs the extra demo")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    root.mkdir()
    for name in "abc":
        (root / f"{name}.py").write_text(f"{name} = '{name}'\n" * 20)
    return root


def cached(folder: Path, shelf: Path, **options: object):
    return cached_corpus(folder, vocab_size=280, cache_dir=shelf, **options)


def shelves(shelf: Path) -> list[str]:
    """Finished corpora; nothing unfinished may lie beside them."""
    assert [path.name for path in shelf.iterdir()] == ["corpora"]
    return sorted(path.name for path in (shelf / "corpora").iterdir())


def test_the_second_run_reuses_what_the_first_one_built(folder: Path, tmp_path: Path) -> None:
    first = cached(folder, tmp_path / "cache")
    second = cached(folder, tmp_path / "cache")
    assert (first.reused, second.reused) == (False, True)
    assert (first.prefix, first.summary) == (second.prefix, second.summary)
    assert TokenStore(first.prefix).num_documents == 3
    assert shelves(tmp_path / "cache") == [Path(first.prefix).parent.name]


def test_another_text_or_option_is_another_corpus(folder: Path, tmp_path: Path) -> None:
    prefixes = {cached(folder, tmp_path / "cache").prefix, cached(folder, tmp_path / "cache", append_eod=False).prefix}
    (folder / "a.py").write_text("changed = True\n")
    prefixes.add(cached(folder, tmp_path / "cache").prefix)
    (folder / "d.py").write_text("added = True\n")
    prefixes.add(cached(folder, tmp_path / "cache").prefix)
    assert len(prefixes) == 4


@pytest.mark.parametrize("name", ["corpus.bin", "corpus.idx", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_corpus_is_built_again(folder: Path, tmp_path: Path, name: str, damage: str) -> None:
    first = cached(folder, tmp_path / "cache")
    path = Path(first.prefix).parent / name
    intact = path.read_bytes()
    if damage == "truncated":
        os.truncate(path, len(intact) // 2)
    else:
        path.unlink()
    again = cached(folder, tmp_path / "cache")
    assert not again.reused
    assert path.read_bytes() == intact
    assert shelves(tmp_path / "cache") == [Path(first.prefix).parent.name]


def test_whoever_is_second_takes_what_the_first_one_put_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both start with an empty cache; the other process finishes while this one is about to rename."""
    import headrace.store.corpus_cache as module

    real_install, results = module._install, []

    def other_first(workshop: Path, home: Path):
        monkeypatch.setattr(module, "_install", real_install)
        results.append(cached(folder, tmp_path / "cache"))
        return real_install(workshop, home)

    monkeypatch.setattr(module, "_install", other_first)
    mine = cached(folder, tmp_path / "cache")
    assert mine.prefix == results[0].prefix
    assert mine.summary == results[0].summary
    assert shelves(tmp_path / "cache") == [Path(mine.prefix).parent.name]


def test_two_processes_at_once_both_succeed(folder: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from headrace.store import cached_corpus, TokenStore; sys.stdin.readline();"
        "print(TokenStore(cached_corpus(sys.argv[1], vocab_size=280, cache_dir=sys.argv[2]).prefix).fingerprint())"
    )
    command = [sys.executable, "-c", program, str(folder), str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    outcomes = [process.communicate("go\n", timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outcomes
    assert outcomes[0][0] == outcomes[1][0]
    assert len(shelves(tmp_path / "cache")) == 1


def test_a_failed_build_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    def interrupted(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(folder, tmp_path / "cache", progress=interrupted)
    assert shelves(tmp_path / "cache") == []


def test_an_unwritable_cache_is_named_with_the_knob(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"cannot be written to .*set XDG_CACHE_HOME"):
        cached(folder, tmp_path / "file" / "cache")


def test_the_cache_lies_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "headrace"
