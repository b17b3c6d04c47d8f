"""The byte-level BPE tokenizer of a corpus: trained here, kept beside the store.

Imports `tokenizers`, an extra, when it is needed. Byte-level: any text can be encoded, no id means "unknown".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

from headrace.errors import ConfigError, FormatError
from headrace.store.manifest import TOKENIZER_FILE, beside

END_OF_DOCUMENT = "<|endoftext|>"
PADDING = "<|padding|>"
# Special tokens come first in a trained vocabulary.
END_OF_DOCUMENT_ID = 0
PADDING_ID = 1


class Tokenizer:
    """Text to ids and back. `eod` ends a document, `pad` never occurs in a corpus; both are ids of the vocabulary."""

    def __init__(self, backend: Any, *, reads_special_tokens: bool = False) -> None:
        """`reads_special_tokens`: text that spells one is that token, as in what a chat template renders."""
        self._backend = backend
        # Source code may well contain the text "<|endoftext|>"; only the corpus builder sets the end of a document.
        backend.encode_special_tokens = not reads_special_tokens

    @property
    def vocab_size(self) -> int:
        """Number of ids: all lie in [0, vocab_size)."""
        return int(self._backend.get_vocab_size())

    @property
    def eod(self) -> int | None:
        """The id that ends a document, None if the tokenizer has none by this name."""
        token: int | None = self._backend.token_to_id(END_OF_DOCUMENT)
        return token

    @property
    def pad(self) -> int | None:
        """The id for padding, None if the tokenizer has none by this name."""
        token: int | None = self._backend.token_to_id(PADDING)
        return token

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without an end-of-document id. Uses all cores."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_begins(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Ids of each text, and the character at which each of them begins."""
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, [begin for begin, _ in encoding.offsets]) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens spelled out; a character cut in half becomes U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def to_json(self) -> str:
        """What tokenizer.json holds."""
        return str(self._backend.to_str())


def train(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` ids (fewer if the text has too few pairs); the same for the same texts.

    The end of a document and the padding have END_OF_DOCUMENT_ID and PADDING_ID.
    """
    tokenizers = _tokenizers()
    if vocab_size < (least := 256 + 2):
        raise ConfigError(
            f"a byte-level vocabulary needs at least {least} ids (256 bytes, 2 special), got {vocab_size}"
        )
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT, PADDING],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_in_order(texts), trainer)
    return Tokenizer(backend)


def load_tokenizer(prefix: str | os.PathLike[str]) -> Tokenizer | None:
    """The tokenizer that lies beside the store `prefix` (see manifest.py); None if there is none.

    Raises ConfigError if the file is there but `tokenizers` is not installed, FormatError if it cannot be parsed.
    """
    path = beside(prefix, TOKENIZER_FILE)
    if not path.is_file():
        return None
    tokenizers = _tokenizers()
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare Exception
        raise FormatError(
            f"{path} is no tokenizer that `tokenizers` {version('tokenizers')} can read: {error}"
        ) from error


def tokenizers_version() -> str:
    """Version of the installed `tokenizers`: another one may merge differently."""
    _tokenizers()
    return version("tokenizers")


def _tokenizers() -> Any:
    try:
        return import_module("tokenizers")
    except ImportError:
        raise ConfigError(
            "turning text into tokens needs the package `tokenizers`: pip install headrace[demo]"
        ) from None


def _in_order(texts: Iterable[str]) -> Iterator[str]:
    # The trainer wants an iterator whose length it may not know.
    yield from texts
