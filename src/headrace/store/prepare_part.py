"""One part of a corpus: some pieces of the inputs, tokenised by one process into a store of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from headrace.store.bpe import Tokenizer
from headrace.store.format import optimal_dtype
from headrace.store.prepare_tokenizer import parse_tokenizer
from headrace.store.records import BadRecord, Piece, Record, RecordReader
from headrace.store.writer import StoreWriter

# Enough text per call to keep the tokenizer's threads busy, little enough to notice soon that the run was stopped.
_BATCH_CHARACTERS = 1_000_000
# Per piece; all are counted. A file of another kind has nothing but bad lines.
_MAX_BAD_KEPT = 100


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PartWriter:
    """Writes parts into a folder. Picklable; the tokenizer is parsed once per process (see prepare_workers)."""

    folder: str
    tokenizer: TokenizerFacts

    def parsed(self) -> Tokenizer:
        """The tokenizer, for this process."""
        return Tokenizer(parse_tokenizer(self.tokenizer.content, where="the tokenizer"))

    def write(self, part: Part, tokenizer: Tokenizer, *, stopped: Callable[[], bool]) -> None:
        """Tokenise a part. Raises as prepare does, and Stopped soon after `stopped` says so."""
        tally = _Tally(part)
        prefix = Path(self.folder) / part.name
        with StoreWriter(prefix, optimal_dtype(self.tokenizer.vocab_size)) as writer:
            for batch in _batches(tally.records(self.tokenizer.key)):
                if stopped():
                    raise Stopped
                self._add(writer, batch, tokenizer, tally)
            record = PartRecord(
                num_documents=writer.num_documents,
                num_tokens=writer.num_tokens,
                num_empty=tally.num_empty,
                pieces=tuple(tally.pieces),
            )
        temporary = prefix.with_suffix(".json.tmp")
        temporary.write_bytes(msgspec.json.encode(record))
        os.replace(temporary, prefix.with_suffix(".json"))

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

    def records(self, key: str) -> Iterator[Record]:
        for piece in self._part.pieces:
            bad: list[BadRecord] = []
            num_bad = 0
            reader = RecordReader(piece, key=key)
            for record in reader:
                if isinstance(record, Record):
                    yield record
                else:
                    num_bad += 1
                    bad += [record] if len(bad) < _MAX_BAD_KEPT else []
            self.pieces.append(
                PieceRecord(path=piece.path, num_lines=reader.num_lines, num_bad=num_bad, bad=tuple(bad))
            )


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
