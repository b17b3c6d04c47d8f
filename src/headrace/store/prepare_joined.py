"""What `prepare` leaves: all parts in one pair, what its ids mean, and the record of what it was made from.

PREFIX.bin .idx                 all parts in order
PREFIX.targets.bin .idx         of chats: the target of each token; put there first
PREFIX.tokenizer.json           what the ids mean, and
PREFIX.manifest.json            what ends a document (see manifest.py)
PREFIX.prepared.json            inputs, options, report; last: with it the work is done, and need not be done again
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, FormatError
from headrace.store.format import optimal_dtype
from headrace.store.manifest import (
    MANIFEST_FILE,
    MANIFEST_VERSION,
    TOKENIZER_FILE,
    Manifest,
    encode_manifest,
    of_pair,
    read_manifest,
    replace_file,
)
from headrace.store.prepare_part import TARGETS, Part, PartRecord, TokenizerFacts
from headrace.store.reader import TokenStore
from headrace.store.records import BadRecord
from headrace.store.writer import StoreWriter
from headrace.wording import counted

PREPARED_FILE = "prepared.json"
PREPARED_VERSION = 1
# What the report shows of what was not taken; all of it is counted.
MAX_BAD_SHOWN = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What a token store was made of."""

    prefix: str
    num_documents: int
    """Empty ones included."""
    num_tokens: int
    """End-of-document ids included."""
    num_empty: int
    """Documents without a token: a boundary, no sequence, no end of document."""
    num_bad: int
    """Records that are not in the store."""
    bad: tuple[BadRecord, ...]
    """The first MAX_BAD_SHOWN of them, with the line of the file."""
    dtype: str
    vocab_size: int
    eod: int | None
    """None: no id was appended."""
    num_targets: int | None
    """Of chats: tokens that are learnt. None: text, whose tokens are all."""
    has_chat_template: bool
    num_parts: int
    num_parts_kept: int
    """Finished by an earlier run that did not end."""
    replaced: bool
    """There was a pair of this name; it is gone."""
    unchanged: bool = False
    """An earlier run had made it from the same inputs with the same options; nothing was done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What decides the bytes of every part."""

    version: int
    tokenizer_sha256: str
    inputs: tuple[tuple[str, int, int], ...]
    """Path, bytes, and time of the last change in ns."""
    key: str
    eod: int | None
    chats_sha256: str | None
    """Of the format of chats; None: text."""
    part_bytes: int
    text_suffixes: tuple[str, ...] = ()
    """Endings of files that are plain text as .txt is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The content of PREFIX.prepared.json."""

    version: int
    plan: Plan
    fingerprints: tuple[str, ...]
    """Of the pair, and of that of its targets."""
    prepared: Prepared


def find_finished(target: Path, plan: Plan) -> Prepared | None:
    """The report of an earlier run of this plan, if what it left is still there."""
    try:
        finished = msgspec.json.decode(of_pair(target, PREPARED_FILE).read_bytes(), type=Finished)
        if (finished.version, finished.plan) != (PREPARED_VERSION, plan):
            return None
        manifest = read_manifest(target)
        found = _fingerprints(target, has_targets=plan.chats_sha256 is not None)
        if found != finished.fingerprints or manifest is None or manifest.fingerprint != found[0]:
            return None
        if _sha256(of_pair(target, TOKENIZER_FILE).read_bytes()) != plan.tokenizer_sha256:
            return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError, FormatError):
        return None
    return replace(finished.prepared, prefix=str(target), num_parts_kept=0, replaced=False, unchanged=True)


def join(
    folder: Path, target: Path, parts: Sequence[Part], records: Sequence[PartRecord], facts: TokenizerFacts
) -> None:
    """The pair, and what its ids mean, in this order. ConfigError without a token."""
    _sweep(target)
    if not any(record.num_tokens for record in records):
        bad = next(_numbered_in_files(records), None)
        first = f", the first is {bad.path}, line {bad.line}: {bad.reason}" if bad else ""
        num_bad = counted(sum(record.num_bad for record in records), "bad record")
        raise ConfigError(f"the inputs hold no text: {num_bad}{first}")
    if facts.chats is not None:
        _join_pairs(folder, Path(f"{target}{TARGETS}"), [f"{part.name}{TARGETS}" for part in parts], np.int32)
    _join_pairs(folder, target, [part.name for part in parts], optimal_dtype(facts.vocab_size))
    content = facts.content.encode()
    with TokenStore(target) as store:
        manifest = Manifest(
            version=MANIFEST_VERSION,
            fingerprint=store.fingerprint(),
            tokenizer_sha256=_sha256(content),
            num_documents=store.num_documents,
            num_tokens=store.num_tokens,
            vocab_size=facts.vocab_size,
            eod=facts.eod,
            pad=None,
            append_eod=facts.eod is not None and facts.chats is None,
            dtype=store.dtype.name,
        )
    _put(target, TOKENIZER_FILE, content)
    _put(target, MANIFEST_FILE, encode_manifest(manifest))


def finish(
    target: Path, plan: Plan, records: Sequence[PartRecord], facts: TokenizerFacts, *, num_kept: int, replaced: bool
) -> Prepared:
    """Write the record, last of all, and return the report."""
    prepared = Prepared(
        prefix=str(target),
        num_documents=sum(record.num_documents for record in records),
        num_tokens=sum(record.num_tokens for record in records),
        num_empty=sum(record.num_empty for record in records),
        num_bad=sum(record.num_bad for record in records),
        bad=tuple(islice(_numbered_in_files(records), MAX_BAD_SHOWN)),
        dtype=optimal_dtype(facts.vocab_size).name,
        vocab_size=facts.vocab_size,
        eod=facts.eod,
        num_targets=None if facts.chats is None else sum(record.num_targets for record in records),
        has_chat_template=facts.chats is not None and facts.chats.template is not None,
        num_parts=len(records),
        num_parts_kept=num_kept,
        replaced=replaced,
    )
    finished = Finished(
        version=PREPARED_VERSION,
        plan=plan,
        fingerprints=_fingerprints(target, has_targets=facts.chats is not None),
        prepared=prepared,
    )
    _put(target, PREPARED_FILE, msgspec.json.format(msgspec.json.encode(finished)) + b"\n")
    return prepared


def _join_pairs(folder: Path, target: Path, names: Sequence[str], dtype: npt.DTypeLike) -> None:
    with StoreWriter(target, dtype) as writer:
        for name in names:
            with TokenStore(folder / name) as store:
                writer.add_store(store)


def _sweep(target: Path) -> None:
    """What a run left here that was killed while it joined: as large as the pair, and nobody else's."""
    left = re.compile(
        rf"\.{re.escape(target.name)}(\.targets)?\.(bin|idx)\.[0-9a-f]{{16}}\.tmp"
        rf"|\.{re.escape(target.name)}\.(tokenizer|manifest|prepared)\.json\.\d+\.tmp"
    )
    for path in target.parent.iterdir():
        if left.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _put(target: Path, name: str, content: bytes) -> None:
    try:
        replace_file(of_pair(target, name), content)
    except OSError as error:
        raise ConfigError(
            f"the pair {target} stands, but {error.filename} cannot be written: {error.strerror}; "
            "make room or remove what is in the way, and run it again"
        ) from error


def _fingerprints(target: Path, *, has_targets: bool) -> tuple[str, ...]:
    found = []
    for prefix in (str(target), f"{target}{TARGETS}")[: 1 + has_targets]:
        with TokenStore(prefix) as store:
            found.append(store.fingerprint())
    return tuple(found)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _numbered_in_files(records: Sequence[PartRecord]) -> Iterator[BadRecord]:
    """Lines counted from the beginning of their file: a process knows only its own piece."""
    lines_before: dict[str, int] = {}
    for piece in chain.from_iterable(record.pieces for record in records):
        before = lines_before.get(piece.path, 0)
        for bad in piece.bad:
            yield BadRecord(path=bad.path, line=before + bad.line, reason=bad.reason)
        lines_before[piece.path] = before + piece.num_lines
