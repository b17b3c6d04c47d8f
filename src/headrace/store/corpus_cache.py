"""A corpus built once and reused: finished folders under the user's cache, put there by one rename.

Two processes may build the same corpus at once: each works in a folder of its own, the first rename wins, the other
result is thrown away. A finished folder is checked when it is used again, and built again if it is damaged.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError, FormatError
from headrace.store import bpe
from headrace.store.manifest import MANIFEST_VERSION, TOKENIZER_FILE
from headrace.store.reader import TokenStore
from headrace.store.text import (
    CorpusSummary,
    Progress,
    build_corpus,
    find_texts,
    read_summary,
    standard_library,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedCorpus:
    """Where a corpus lies and what is in it."""

    prefix: str
    summary: CorpusSummary
    reused: bool
    """It was there already; nothing was built."""


def cached_corpus(
    folder: str | os.PathLike[str] | None = None,
    *,
    pattern: str = "*.py",
    vocab_size: int = 16384,
    append_eod: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> CachedCorpus:
    """The corpus of the text files below `folder` (default: the standard library), built unless it is cached.

    Another set of files, a changed file (by size or time), another option or another version of `tokenizers` is
    another corpus. `cache_dir` defaults to $XDG_CACHE_HOME/headrace or ~/.cache/headrace. Raises ConfigError as
    `build_corpus` does, and if the cache cannot be written.
    """
    source = Path(folder) if folder is not None else standard_library()
    key = _key(source, pattern, vocab_size, append_eod)
    shelf = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    home = shelf / "corpora" / f"{source.resolve().name or 'root'}-{key}"
    if (summary := _intact(home)) is not None:
        return CachedCorpus(prefix=str(home / "corpus"), summary=summary, reused=True)

    # Not among the finished ones, but in the same file system, for the rename.
    workshop = shelf / f".{home.name}.{secrets.token_hex(8)}.tmp"
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        workshop.mkdir()
        try:
            build_corpus(
                source,
                workshop / "corpus",
                pattern=pattern,
                vocab_size=vocab_size,
                append_eod=append_eod,
                progress=progress,
            )
            summary = _install(workshop, home)
        finally:
            shutil.rmtree(workshop, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"the corpus cannot be written to {error.filename or home}: {error.strerror}; "
            "set XDG_CACHE_HOME to a writable folder with room"
        ) from error
    return CachedCorpus(prefix=str(home / "corpus"), summary=summary, reused=False)


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/headrace, or ~/.cache/headrace. The XDG specification wants a relative path ignored."""
    wanted = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(wanted) if os.path.isabs(wanted) else Path.home() / ".cache") / "headrace"


def _key(source: Path, pattern: str, vocab_size: int, append_eod: bool) -> str:
    """16 hexadecimal digits over everything the corpus depends on; files count by path, size and modification time."""
    digest = hashlib.sha256()
    settings = (MANIFEST_VERSION, bpe.tokenizers_version(), str(source.resolve()), pattern, vocab_size, append_eod)
    digest.update(repr(settings).encode())
    for path in find_texts(source, pattern):
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def _intact(home: Path) -> CorpusSummary | None:
    """The summary of a finished corpus whose files are what its manifest says; None if it is missing or damaged."""
    try:
        summary = read_summary(home / "corpus")
        if summary is None:
            return None
        tokenizer = (home / TOKENIZER_FILE).read_bytes()
        with TokenStore(home / "corpus") as store:
            same = store.fingerprint() == summary.fingerprint
    except (ConfigError, FormatError, OSError):
        return None
    return summary if same and hashlib.sha256(tokenizer).hexdigest() == summary.tokenizer_sha256 else None


def _install(workshop: Path, home: Path) -> CorpusSummary:
    """Move the finished folder to its place, unless another process was first. Returns the summary of what is there."""
    if (summary := _intact(home)) is not None:
        return summary
    with suppress(FileNotFoundError):
        os.rename(home, workshop / "damaged")
    try:
        os.rename(workshop, home)
    except OSError:
        # Another process put its own there in the meantime (ENOTEMPTY); equal inputs, equal corpus.
        if (summary := _intact(home)) is not None:
            return summary
        raise
    shutil.rmtree(home / "damaged", ignore_errors=True)
    summary = _intact(home)
    if summary is None:
        raise FormatError(f"the corpus just written to {home} reads back differently; check the disk")
    return summary
