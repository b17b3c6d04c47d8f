"""The token store of a run: an existing pair, the text of a folder, or the standard library of the running Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headrace.demo.settings import Corpus, DemoSettings
from headrace.errors import ConfigError
from headrace.feed.packed_tokens import PackedTokens
from headrace.store import TokenStore, cached_corpus, read_manifest

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, files done, files in all)."""


def find_corpus(*, prefix: str | None, text_folder: str | None, progress: Progress | None = None) -> Corpus:
    """The store at `prefix`, or one built from `text_folder` (None: the standard library) and kept in the cache.

    Blocks for about 20 s while it builds. ConfigError or FormatError for a store or a folder that cannot be used.
    """
    if prefix is not None:
        if text_folder is not None:
            raise ConfigError(f"give either a corpus or a text folder, not both: {prefix} and {text_folder}")
        return existing(prefix)
    # Any text may lie in a folder that the user names; of the standard library only the sources are text.
    built = cached_corpus(text_folder, pattern="*.py" if text_folder is None else "*", progress=progress)
    return Corpus(
        prefix=built.prefix,
        documents=built.summary.num_documents,
        tokens=built.summary.num_tokens,
        vocab_size=built.summary.vocab_size,
        eod=built.summary.eod if built.summary.append_eod else None,
    )


def existing(prefix: str) -> Corpus:
    """A pair that is there already. Without a manifest beside it, the vocabulary is what its ids need."""
    manifest = read_manifest(prefix)
    with TokenStore(prefix) as store:
        if store.num_tokens == 0:
            raise ConfigError(f"the corpus {prefix} holds no token; choose another one")
        described = manifest is not None and manifest.fingerprint == store.fingerprint()
        corpus = Corpus(
            prefix=store.prefix,
            documents=store.num_documents,
            tokens=store.num_tokens,
            vocab_size=store.token_id_range[1] + 1,
            eod=None,
        )
    if manifest is None or not described:
        return corpus
    return replace(corpus, vocab_size=manifest.vocab_size, eod=manifest.eod if manifest.append_eod else None)


def source_of(corpus: Corpus, settings: DemoSettings) -> PackedTokens:
    """The samples that all contenders read. ConfigError if the corpus is shorter than one of them."""
    need = settings.seq_length + 1
    if corpus.tokens < need:
        raise ConfigError(
            f"one sample needs {need:,} tokens, the corpus {corpus.prefix} has {corpus.tokens:,}; "
            "lower seq_length or use more text"
        )
    return PackedTokens(
        corpus.prefix,
        seq_length=settings.seq_length,
        micro_batch_size=settings.micro_batch_size,
        seed=settings.seed,
        num_samples=settings.num_batches * settings.micro_batch_size,
        layout="transformers",
        eod=corpus.eod,
        eod_mask_loss=corpus.eod is not None,
        vocab_size=corpus.vocab_size,
    )
