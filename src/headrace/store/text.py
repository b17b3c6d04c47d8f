"""Text files to a token store: collect, train a tokenizer on a sample, tokenise, write.

One file is one document. Files are taken in the order of their paths, so the same folder gives the same bytes.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError
from headrace.store import bpe
from headrace.store.format import optimal_dtype, prefix_of
from headrace.store.manifest import (
    MANIFEST_FILE,
    MANIFEST_VERSION,
    TOKENIZER_FILE,
    Manifest,
    decode_manifest,
    encode_manifest,
    replace_file,
)
from headrace.store.reader import TokenStore
from headrace.store.writer import StoreWriter

# Third-party code beside the standard library, compiled files, version control: not part of a folder's text.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})

# Merges settle long before this: a 16k vocabulary of Python trained on 8 MB encodes as tightly as one trained on 31.
_TRAINING_BYTES = 8_000_000
# One huge generated file must not decide the vocabulary.
_TRAINING_BYTES_PER_FILE = 200_000
# Enough text per call to keep all cores of the tokenizer busy, little enough to hold in memory.
_BATCH_BYTES = 4_000_000

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, files done, files in all)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSummary(Manifest):
    """What a corpus is made of; the content of the folder's manifest.json."""

    eod: int
    pad: int
    text_sha256: str
    """Over all documents in order."""
    tokenizers_version: str
    num_bytes: int
    """UTF-8 bytes of the text."""
    skipped_not_text: int
    """Files that are not UTF-8, or hold NUL bytes."""
    skipped_empty: int
    """Files without a byte."""


def standard_library() -> Path:
    """Folder of the running Python's standard library: thousands of real source files on every machine."""
    return Path(sysconfig.get_path("stdlib"))


def build_corpus(
    folder: str | os.PathLike[str],
    prefix: str | os.PathLike[str],
    *,
    pattern: str = "*.py",
    vocab_size: int = 16384,
    append_eod: bool = True,
    progress: Progress | None = None,
) -> CorpusSummary:
    """Tokenise the files below `folder` whose names match `pattern` into PREFIX.bin / PREFIX.idx.

    tokenizer.json and manifest.json are written into the same folder; the manifest comes last, so a pair with a
    manifest is complete. Every file is replaced as a whole. Raises ConfigError if the folder is missing or unreadable,
    has no matching file or no text, or `tokenizers` is not installed. Takes seconds to minutes; `progress` is called
    from this thread.
    """
    report = progress or _silent
    target = Path(prefix_of(prefix))
    files = find_texts(folder, pattern)
    tokenizer = bpe.train(_training_texts(files, report), vocab_size=vocab_size)

    texts = _Texts(files, report)
    dtype = optimal_dtype(tokenizer.vocab_size)
    with StoreWriter(target, dtype) as writer:
        for batch in texts.batches():
            for ids in tokenizer.encode_batch(batch):
                writer.add_document([*ids, bpe.END_OF_DOCUMENT_ID] if append_eod else ids)
        if writer.num_tokens == 0:
            raise ConfigError(
                f"no readable text below {os.fspath(folder)}: of {len(files)} files named {pattern} "
                f"{texts.skipped_not_text} are not UTF-8 text and {texts.skipped_empty} are empty; "
                "choose another folder"
            )
    with TokenStore(target) as store:
        summary = CorpusSummary(
            version=MANIFEST_VERSION,
            fingerprint=store.fingerprint(),
            tokenizer_sha256=hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
            text_sha256=texts.digest.hexdigest(),
            tokenizers_version=bpe.tokenizers_version(),
            num_documents=store.num_documents,
            num_tokens=store.num_tokens,
            num_bytes=texts.num_bytes,
            skipped_not_text=texts.skipped_not_text,
            skipped_empty=texts.skipped_empty,
            vocab_size=tokenizer.vocab_size,
            eod=bpe.END_OF_DOCUMENT_ID,
            pad=bpe.PADDING_ID,
            append_eod=append_eod,
            dtype=dtype.name,
        )
    replace_file(target.parent / TOKENIZER_FILE, tokenizer.to_json().encode())
    replace_file(target.parent / MANIFEST_FILE, encode_manifest(summary))
    return summary


def read_summary(prefix: str | os.PathLike[str]) -> CorpusSummary | None:
    """What `build_corpus` left in the folder's manifest.json; None if there is none. FormatError if it is not ours."""
    return decode_manifest(Path(prefix_of(prefix)).parent / MANIFEST_FILE, CorpusSummary)


def find_texts(folder: str | os.PathLike[str], pattern: str) -> list[Path]:
    """Files below `folder` named like `pattern`, in the order of their paths. Raises ConfigError if there are none."""
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder; name one with text files in it")
    if not os.access(root, os.R_OK | os.X_OK):
        raise ConfigError(f"{root} cannot be read; check its permissions or name another folder")
    found: list[Path] = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")]
        found += (path for name in fnmatch.filter(names, pattern) if (path := Path(parent, name)).is_file())
    if not found:
        raise ConfigError(f"{root} has no file named {pattern}; name another folder or another `pattern`")
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


class _Texts:
    """The texts of a list of files in order, counted and digested on the way."""

    def __init__(self, files: Sequence[Path], report: Progress) -> None:
        self._files = files
        self._report = report
        self.digest = hashlib.sha256()
        self.num_bytes = 0
        self.skipped_not_text = 0
        self.skipped_empty = 0

    def batches(self) -> Iterator[list[str]]:
        batch: list[str] = []
        batch_bytes = 0
        for done, path in enumerate(self._files):
            text = _read_text(path)
            if text is None:
                self.skipped_not_text += 1
            elif not text:
                self.skipped_empty += 1
            else:
                raw = text.encode()
                self.digest.update(len(raw).to_bytes(8, "little") + raw)
                self.num_bytes += len(raw)
                batch.append(text)
                batch_bytes += len(raw)
            if batch_bytes >= _BATCH_BYTES:
                yield batch
                self._report("tokenise", done + 1, len(self._files))
                batch, batch_bytes = [], 0
        if batch:
            yield batch
        self._report("tokenise", len(self._files), len(self._files))


def _training_texts(files: Sequence[Path], report: Progress) -> Iterator[str]:
    """An evenly spread sample of the files, bounded in bytes."""
    sizes = [min(path.stat().st_size, _TRAINING_BYTES_PER_FILE) for path in files]
    stride = -(-sum(sizes) // _TRAINING_BYTES) or 1
    chosen = files[::stride]
    for done, path in enumerate(chosen):
        if text := _read_text(path):
            yield text[:_TRAINING_BYTES_PER_FILE]
        report("train", done + 1, len(chosen))


def _read_text(path: Path) -> str | None:
    """The file's text with its line ends as they are; None if it is not UTF-8 text or cannot be read."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return None if "\0" in text else text


def _silent(stage: str, done: int, total: int) -> None:
    """No progress wanted."""
