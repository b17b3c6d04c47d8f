"""One part of a corpus: some pieces of the inputs, tokenised by one process into a store of its own.

Chats make two, the second of which holds the target of each token: the token itself where it is learnt, else -100.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from headrace.store.bpe import Tokenizer
from headrace.store.chats import NO_TARGET, ChatFormat, Spans
from headrace.store.format import optimal_dtype
from headrace.store.prepare_tokenizer import parse_tokenizer
from headrace.store.records import BadRecord, Piece, Record, RecordReader
from headrace.store.writer import StoreWriter

# Enough text per call to keep the tokenizer's threads busy, little enough to notice soon that the run was stopped.
_BATCH_CHARACTERS = 1_000_000
# Per piece; all are counted. A file of another kind has nothing but bad lines.
_MAX_BAD_KEPT = 100


TARGETS = ".targets"
"""What follows a prefix in the name of the pair that holds its targets."""


class Stopped(Exception):
    """The run was stopped; the part that was being written is thrown away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Consecutive pieces of the inputs."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.number:05d}"

    @property
    def num_bytes(self) -> int:
        """About how much there is to do."""
        return sum(piece.num_bytes for piece in self.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceRecord:
    """What was found in one piece."""

    path: str
    num_lines: int
    num_bad: int
    bad: tuple[BadRecord, ...]
    """The first of them, with lines counted from the piece's beginning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """The content of a part's .json file."""

    num_documents: int
    num_tokens: int
    num_empty: int
    num_targets: int
    """Tokens that are learnt; 0 without chats."""
    pieces: tuple[PieceRecord, ...]

    @property
    def num_bad(self) -> int:
        """Records that are not in the part."""
        return sum(piece.num_bad for piece in self.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFacts:
    """How text becomes tokens; small enough to be sent to each process once."""

    content: str
    """Of tokenizer.json."""
    vocab_size: int
    eod: int | None
    key: str
    chats: ChatFormat | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PartWriter:
    """Writes parts into a folder. Picklable; the tokenizer is parsed once per process (see prepare_workers)."""

    folder: str
    tokenizer: TokenizerFacts

    def parsed(self) -> Tokenizer:
        """The tokenizer, for this process."""
        chats = self.tokenizer.chats
        backend = parse_tokenizer(self.tokenizer.content, where="the tokenizer")
        return Tokenizer(backend, reads_special_tokens=chats is not None and chats.template is not None)

    def write(self, part: Part, tokenizer: Tokenizer, *, stopped: Callable[[], bool]) -> None:
        """Tokenise a part. Raises as prepare does, and Stopped soon after `stopped` says so."""
        tally = _Tally(part)
        prefix = Path(self.folder) / part.name
        with StoreWriter(prefix, optimal_dtype(self.tokenizer.vocab_size)) as writer, self._targets(prefix) as targets:
            for batch in _batches(tally.records(self.tokenizer)):
                if stopped():
                    raise Stopped
                if targets is None:
                    self._add(writer, batch, tokenizer, tally)
                else:
                    self._add_chats(writer, targets, batch, tokenizer, tally)
            record = PartRecord(
                num_documents=writer.num_documents,
                num_tokens=writer.num_tokens,
                num_empty=tally.num_empty,
                num_targets=tally.num_targets,
                pieces=tuple(tally.pieces),
            )
        temporary = prefix.with_suffix(".json.tmp")
        temporary.write_bytes(msgspec.json.encode(record))
        os.replace(temporary, prefix.with_suffix(".json"))

    def _targets(self, prefix: Path) -> AbstractContextManager[StoreWriter | None]:
        return nullcontext() if self.tokenizer.chats is None else StoreWriter(f"{prefix}{TARGETS}", np.int32)

    def _add_chats(
        self, writer: StoreWriter, targets: StoreWriter, batch: list[Record], tokenizer: Tokenizer, tally: _Tally
    ) -> None:
        encoded = iter(tokenizer.encode_with_begins([text for record in batch for text in record.texts]))
        eod = self.tokenizer.eod
        for record in batch:
            ids: list[int] = []
            wanted: list[int] = []
            for text, learnt in zip(record.texts, record.learnt, strict=True):
                of_text, begins = next(encoded)
                ids += of_text
                wanted += _targets_of(of_text, begins, learnt)
                # Where the assistant ends it is to stop.
                if eod is not None and learnt and learnt[-1][1] == len(text):
                    ids.append(eod)
                    wanted.append(eod)
            tally.num_empty += not ids
            tally.num_targets += len(wanted) - wanted.count(NO_TARGET)
            writer.add_document(ids)
            targets.add_document(wanted)

    def _add(self, writer: StoreWriter, batch: list[Record], tokenizer: Tokenizer, tally: _Tally) -> None:
        encoded = iter(tokenizer.encode_batch([text for record in batch for text in record.texts]))
        for record in batch:
            sequences = [ids for _, ids in zip(record.texts, encoded, strict=False) if ids]
            if not sequences:
                tally.num_empty += 1
            elif self.tokenizer.eod is not None:
                sequences[-1].append(self.tokenizer.eod)
            writer.add_document(list(chain(*sequences)), [len(ids) for ids in sequences])


class _Tally:
    """Counts what passes: lines and bad records per piece."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self.pieces: list[PieceRecord] = []
        self.num_empty = 0
        self.num_targets = 0

    def records(self, facts: TokenizerFacts) -> Iterator[Record]:
        for piece in self._part.pieces:
            bad: list[BadRecord] = []
            num_bad = 0
            reader = RecordReader(piece, key=facts.key, chats=facts.chats)
            for record in reader:
                if isinstance(record, Record):
                    yield record
                else:
                    num_bad += 1
                    bad += [record] if len(bad) < _MAX_BAD_KEPT else []
            self.pieces.append(
                PieceRecord(path=piece.path, num_lines=reader.num_lines, num_bad=num_bad, bad=tuple(bad))
            )


def _targets_of(ids: list[int], begins: list[int], learnt: Spans) -> list[int]:
    """Each id that begins in what is learnt, else NO_TARGET. Spans rise, as do the places where ids begin."""
    edges = np.array(learnt, np.int64).reshape(-1)
    inside = np.searchsorted(edges, np.array(begins, np.int64), side="right") % 2 == 1
    found: list[int] = np.where(inside, ids, NO_TARGET).tolist() if ids else []
    return found


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    characters = 0
    for record in records:
        batch.append(record)
        # Empty texts count too, or a file of them would be gathered whole.
        characters += sum(map(len, record.texts)) + 1
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
