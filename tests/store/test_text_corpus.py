"""Text to tokens: what is collected, that decoding gives the text back, and every folder that cannot be used."""

import json
from pathlib import Path

import pytest

from headrace.errors import ConfigError, FormatError
from headrace.store import (
    TokenStore,
    build_corpus,
    load_tokenizer,
    optimal_dtype,
    read_manifest,
    standard_library,
)
from headrace.store.text import find_texts, read_summary

pytest.importorskip("tokenizers", reason="needs the extra demo")

SENTENCE = "def mill(wheel):\n    return wheel * 'gründlich'  # <|endoftext|>\r\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "b" / "site-packages").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "b.py").write_bytes(b"second = 2\n" * 50)
    (root / "a.py").write_bytes((SENTENCE * 40).encode())
    (root / "b" / "c.py").write_bytes(b"third = 3\n")
    (root / "b" / "site-packages" / "foreign.py").write_bytes(b"x\n")
    (root / ".git" / "hidden.py").write_bytes(b"x\n")
    (root / "latin.py").write_bytes("s = 'gründlich'".encode("latin-1"))
    (root / "binary.py").write_bytes(b"abc\0def")
    (root / "empty.py").write_bytes(b"")
    (root / "notes.txt").write_bytes(b"not matched\n")
    return root


def build(folder: Path, prefix: Path, **options: object):
    return build_corpus(folder, prefix, vocab_size=300, **options)


def test_one_document_per_file_in_order_of_paths_and_decoding_gives_the_text(folder: Path, tmp_path: Path) -> None:
    summary = build(folder, tmp_path / "corpus")
    tokenizer = load_tokenizer(tmp_path / "corpus")
    with TokenStore(tmp_path / "corpus") as store:
        texts = []
        for i in range(len(store)):
            ids = store.read(i).tolist()
            assert ids[-1] == summary.eod
            assert ids.count(summary.eod) == 1
            texts.append(tokenizer.decode(ids[:-1]))
        assert texts == [SENTENCE * 40, "second = 2\n" * 50, "third = 3\n"]
        assert summary.num_documents == store.num_documents == 3
        assert summary.num_tokens == store.num_tokens
        assert store.token_id_range[1] < summary.vocab_size == tokenizer.vocab_size == 300
        assert store.dtype == optimal_dtype(300)
    assert (summary.skipped_not_text, summary.skipped_empty) == (2, 1)
    assert summary.num_bytes == len((SENTENCE * 40).encode()) + 550 + 10
    assert (tokenizer.eod, tokenizer.pad) == (summary.eod, summary.pad)
    assert read_summary(tmp_path / "corpus") == summary
    manifest = read_manifest(tmp_path / "corpus")
    assert manifest is not None
    assert (manifest.fingerprint, manifest.eod, manifest.pad) == (summary.fingerprint, summary.eod, summary.pad)


def test_the_same_folder_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        build(folder, tmp_path / name / "corpus")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["corpus.bin", "corpus.idx", "manifest.json", "tokenizer.json"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_without_eod_no_document_ends_in_one(folder: Path, tmp_path: Path) -> None:
    summary = build(folder, tmp_path / "corpus", append_eod=False)
    assert TokenStore(tmp_path / "corpus").token_id_range[0] > summary.eod


def test_progress_counts_up_to_the_end_of_each_stage(folder: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    build(folder, tmp_path / "corpus", progress=lambda *call: calls.append(call))
    assert [stage for stage, done, total in calls if done == total] == ["train", "tokenise"]


def test_the_standard_library_is_there_and_large() -> None:
    files = find_texts(standard_library(), "*.py")
    assert len(files) > 300
    assert not any("site-packages" in path.parts for path in files)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        build(tmp_path / "nowhere", tmp_path / "corpus")


def test_a_folder_without_a_matching_file_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no file named \*\.rst; name another folder or another `pattern`"):
        build(folder, tmp_path / "corpus", pattern="*.rst")


def test_a_folder_without_readable_text_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "texts"
    root.mkdir()
    (root / "binary.py").write_bytes(b"\xff\xfe")
    (root / "empty.py").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"no readable text below .*of 2 files .* 1 are not UTF-8 text and 1 are empty"
    ):
        build(root, tmp_path / "corpus")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_a_vocabulary_smaller_than_the_bytes_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 258 ids"):
        build_corpus(folder, tmp_path / "corpus", vocab_size=257)


def test_without_the_package_one_sentence_names_the_extra(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install headrace\[demo\]"):
        build(folder, tmp_path / "corpus")


def test_a_store_without_tokenizer_or_manifest_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path / "corpus") is None
    assert read_manifest(tmp_path / "corpus") is None


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer(tmp_path / "corpus")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(FormatError, match=r"manifest\.json is no manifest"):
        read_manifest(tmp_path / "corpus")


def test_a_manifest_of_another_version_is_refused(folder: Path, tmp_path: Path) -> None:
    build(folder, tmp_path / "corpus")
    path = tmp_path / "manifest.json"
    content = json.loads(path.read_text())
    content["version"] = 2
    path.write_text(json.dumps(content))
    with pytest.raises(FormatError, match="has version 2, only version 1"):
        read_manifest(tmp_path / "corpus")
