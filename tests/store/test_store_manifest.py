"""How many ids a model of a pair needs: its own manifest says it, else its tokens, else nobody."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError, FormatError
from headrace.store import Manifest, StoreWriter, TokenStore, vocab_size_of
from headrace.store.manifest import MANIFEST_FILE, MANIFEST_VERSION, encode_manifest, of_pair


def write_pair(prefix: Path, *documents: list[int]) -> Path:
    with StoreWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def describe(prefix: Path, *, vocab_size: int, fingerprint: str) -> None:
    manifest = Manifest(
        version=MANIFEST_VERSION, fingerprint=fingerprint, tokenizer_sha256="", num_documents=1, num_tokens=3,
        vocab_size=vocab_size, eod=None, pad=None, append_eod=False, dtype="uint16",
    )  # fmt: skip
    of_pair(prefix, MANIFEST_FILE).write_bytes(encode_manifest(manifest))


def test_the_manifest_of_the_pair_says_it(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "corpus", [1, 2, 700])
    describe(prefix, vocab_size=8192, fingerprint=TokenStore(prefix).fingerprint())
    assert vocab_size_of(prefix) == 8192


def test_without_a_manifest_of_its_own_the_largest_id_does(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "corpus", [1, 2, 700], [3])
    assert vocab_size_of(prefix) == 701
    describe(prefix, vocab_size=8192, fingerprint="of another pair")
    assert vocab_size_of(prefix) == 701


def test_a_pair_that_cannot_tell_is_refused(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "corpus", [])
    with pytest.raises(ConfigError, match=r"how many ids .*corpus needs: it holds no token .* `headrace prepare`"):
        vocab_size_of(prefix)
    of_pair(prefix, MANIFEST_FILE).write_text("{}")
    with pytest.raises(FormatError, match="is no manifest"):
        vocab_size_of(prefix)
