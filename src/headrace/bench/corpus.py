"""Which tokens a bench reads: the user's store, the one `headrace demo` has built, or a synthetic one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.bench.pack import SYNTHETIC_EOD, SYNTHETIC_MEDIAN_TOKENS, SYNTHETIC_SIGMA, SYNTHETIC_VOCABULARY
from headrace.store import StoreWriter, TokenStore
from headrace.store.corpus_cache import default_cache_dir

SYNTHETIC_TOKENS = 8_000_000
"""As many as the standard library's source has under the demo's tokenizer: 16 MB, in the page cache after one epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A token store and where it comes from: "given", "demo" or "synthetic"."""

    prefix: str
    origin: str
    num_documents: int
    num_tokens: int


@contextmanager
def choose_corpus(prefix: str | None, *, num_tokens: int = SYNTHETIC_TOKENS, seed: int = 1234) -> Iterator[Corpus]:
    """The store at `prefix`; without one the newest that the demo has cached, else one of `num_tokens` tokens.

    The synthetic one lies in a temporary folder and goes with the context. ConfigError and FormatError of TokenStore.
    """
    if prefix is not None:
        yield _described(prefix, "given")
        return
    cached = sorted((default_cache_dir() / "corpora").glob("*/corpus.idx"), key=lambda path: path.stat().st_mtime)
    if cached:
        yield _described(str(cached[-1].with_suffix("")), "demo")
        return
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        path = str(Path(folder) / "synthetic")
        write_synthetic(path, num_tokens=num_tokens, seed=seed)
        yield _described(path, "synthetic")


def write_synthetic(prefix: str, *, num_tokens: int, seed: int) -> None:
    """A uint16 store of about `num_tokens` tokens, its document lengths lognormal with the long tail of web text."""
    random = np.random.default_rng(seed)
    with StoreWriter(prefix, np.uint16) as writer:
        while writer.num_tokens < num_tokens:
            length = max(2, int(random.lognormal(np.log(SYNTHETIC_MEDIAN_TOKENS["synthetic"]), SYNTHETIC_SIGMA)))
            document = random.integers(1, SYNTHETIC_VOCABULARY, length, dtype=np.uint16)
            document[-1] = SYNTHETIC_EOD
            writer.add_document(document)


def _described(prefix: str, origin: str) -> Corpus:
    with TokenStore(prefix) as store:
        return Corpus(prefix=prefix, origin=origin, num_documents=store.num_documents, num_tokens=store.num_tokens)
