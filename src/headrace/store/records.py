"""Files of text to records: what can be read, cut into pieces that processes may take in any order.

| ending                | one document is                      | a piece is                         | "line" |
|-----------------------|--------------------------------------|------------------------------------|--------|
| .txt, `text_suffixes` | the file                             | the file                           | line   |
| .jsonl                | the value of `key` in one line       | the lines that begin in a range    | line   |
| .jsonl.gz, .jsonl.zst | the same                             | the file: one can only begin there | line   |
| .parquet              | the value of column `key` in one row | a row group                        | row    |

A value is a string, or a list of strings: one sequence each, as Megatron's preprocess_data.py takes sentences. With a
chat format it is the whole object of the line, or the row (chats.py). What is no such value is a `BadRecord`, never an
exception: one bad line in a billion must not end a night's work. A file that breaks off (a cut .gz) is a FormatError:
nobody knows what is missing.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ConfigError, FormatError
from headrace.store.chats import ChatFormat, NoChat, Spans
from headrace.store.text import find_texts

LINE_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
ENDINGS = (".txt", *LINE_ENDINGS, ".parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of one file: bytes [begin, end) of .jsonl, row groups [begin, end) of .parquet, else the whole file."""

    path: str
    begin: int = 0
    end: int = 0
    num_bytes: int
    """About how much there is to do: bytes on disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One document; more than one text where the source holds a list of sentences."""

    texts: Sequence[str]
    line: int
    """From 1 on, counted from the piece's beginning."""
    learnt: Sequence[Spans] = ()
    """Of each text of a chat, what is learnt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRecord:
    """What stands where a document should, and why it is none."""

    path: str
    line: int
    reason: str


def find_inputs(inputs: Sequence[str | os.PathLike[str]], text_suffixes: Sequence[str] = ()) -> list[Path]:
    """The files named, and those below the folders named that have one of ENDINGS or of `text_suffixes`.

    In order of their paths. Raises ConfigError for what is missing, a file of another kind, a folder without any, and
    suffixes that are none.
    """
    found: list[Path] = []
    endings = (*ENDINGS, *known_suffixes(text_suffixes))
    known = f"{', '.join(endings)}; --suffix names other endings of plain text, such as --suffix .md,.py"
    for name in map(Path, inputs):
        if name.is_dir():
            below = [path for path in find_texts(name, "*") if path.name.endswith(endings)]
            if not below:
                raise ConfigError(f"{name} holds no file that ends in {known}")
            found += below
        elif not name.is_file():
            raise ConfigError(f"there is no file or folder {name}")
        elif not name.name.endswith(endings):
            raise ConfigError(f"{name} is of no kind that can be read; its name must end in {known}")
        else:
            found.append(name)
    return found


def known_suffixes(text_suffixes: Sequence[str]) -> tuple[str, ...]:
    """In order and once each, .txt left out. ConfigError for what ends no name, or the name of another kind of file."""
    for suffix in text_suffixes:
        if not suffix.startswith(".") or len(suffix) < 2 or "/" in suffix:
            raise ConfigError(f"--suffix takes endings such as .md,.py, got {suffix!r}")
        if suffix.endswith((*LINE_ENDINGS, ".parquet")):
            raise ConfigError(f"files that end in {suffix} hold records, not plain text; leave it out of --suffix")
    return tuple(sorted(set(text_suffixes) - {".txt"}))


def pieces_of(path: Path, *, piece_bytes: int) -> Iterator[Piece]:
    """The pieces of a file in order. Opens a .parquet file to count its row groups."""
    size, name = path.stat().st_size, str(path)
    if name.endswith(".jsonl"):
        for begin in range(0, size, piece_bytes):
            end = min(begin + piece_bytes, size)
            yield Piece(path=name, begin=begin, end=end, num_bytes=end - begin)
    elif name.endswith(".parquet"):
        groups = _parquet(name).num_row_groups
        for group in range(groups):
            yield Piece(path=name, begin=group, end=group + 1, num_bytes=size // groups)
    else:
        yield Piece(path=name, num_bytes=size)


class RecordReader:
    """The records of a piece in order, once.

    Iterating raises FormatError for a damaged file and ConfigError for one that cannot be opened.
    """

    def __init__(self, piece: Piece, *, key: str, chats: ChatFormat | None = None) -> None:
        self._piece, self._key, self._chats = piece, key, chats
        self.num_lines = 0
        """Lines, or rows, read so far; in the end what the line numbers of the file's next piece are short of."""

    def __iter__(self) -> Iterator[Record | BadRecord]:
        path = self._piece.path
        try:
            if path.endswith(".parquet"):
                for row in _rows(self._piece, self._key if self._chats is None else None):
                    self.num_lines += 1
                    yield self._record(row, self.num_lines)
            elif path.endswith(LINE_ENDINGS):
                for raw in _lines(self._piece):
                    self.num_lines += 1
                    if not raw.isspace():
                        yield self._json_record(raw, self.num_lines)
            else:
                yield _text_record(path) if self._chats is None else BadRecord(path=path, line=1, reason="no chat")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise FormatError(f"{path} is damaged: {error}; fetch it again") from error
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error

    def _json_record(self, raw: bytes, line: int) -> Record | BadRecord:
        path = self._piece.path
        try:
            document = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return BadRecord(path=path, line=line, reason=f"not JSON: {error}")
        except RecursionError:
            return BadRecord(path=path, line=line, reason="nested too deeply to be read")
        if not isinstance(document, dict):
            return BadRecord(path=path, line=line, reason=f"a {type(document).__name__}, not an object")
        return self._record(document, line)

    def _record(self, document: dict[str, Any], line: int) -> Record | BadRecord:
        path, key = self._piece.path, self._key
        if self._chats is not None:
            try:
                said = self._chats.read(document, key=key)
            except NoChat as error:
                return BadRecord(path=path, line=line, reason=str(error))
            return Record(texts=[one.text for one in said], line=line, learnt=[one.learnt for one in said])
        if key not in document:
            return BadRecord(path=path, line=line, reason=f"no key {key!r}, only {', '.join(map(repr, document))}")
        value = document[key]
        if isinstance(value, str):
            return Record(texts=[value], line=line)
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return Record(texts=value, line=line)
        return BadRecord(path=path, line=line, reason=f"{key!r} is a {type(value).__name__}, not text")


def _lines(piece: Piece) -> Iterator[bytes]:
    """Lines that begin in the piece: the last one may end behind it, and one that began before it is not its own."""
    if not piece.path.endswith(".jsonl"):
        with _decompressed(piece.path) as stream:
            yield from stream
        return
    with open(piece.path, "rb") as stream:
        # One byte earlier: a line that begins exactly here belongs here.
        position = max(piece.begin - 1, 0)
        stream.seek(position)
        if piece.begin:
            position += len(stream.readline())
        while position < piece.end and (line := stream.readline()):
            position += len(line)
            yield line


def _decompressed(path: str) -> Any:
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    return io.BufferedReader(_ZstandardFrames(path), 1 << 20)


class _ZstandardFrames(io.RawIOBase):
    """All frames of a file: parallel compressors write many. zstandard's own reader takes a cut frame for the end."""

    def __init__(self, path: str) -> None:
        self._zstandard = _extra("zstandard", path)
        self._stream = open(path, "rb")  # noqa: SIM115 - closed by close
        self._frame: Any = None
        self._compressed = b""
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        while not self._text:
            chunk = self._compressed or self._stream.read(1 << 17)
            if not chunk:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._text = memoryview(frame.decompress(chunk))
            except self._zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            self._compressed, self._frame = frame.unused_data, None if frame.eof else frame
        count = min(len(room), len(self._text))
        room[:count], self._text = self._text[:count], self._text[count:]
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def _text_record(path: str) -> Record | BadRecord:
    raw = Path(path).read_bytes()
    try:
        return Record(texts=[raw.decode("utf-8")], line=1)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return BadRecord(path=path, line=line, reason=f"not UTF-8: byte {raw[error.start]:#04x}")


def _rows(piece: Piece, key: str | None) -> Iterator[dict[str, Any]]:
    """Rows of a row group with all columns, or the one that is named."""
    file = _parquet(piece.path)
    if key is not None and key not in file.schema_arrow.names:
        raise ConfigError(f"{piece.path} has no column {key!r}, only {', '.join(file.schema_arrow.names)}")
    columns = None if key is None else [key]
    for batch in file.iter_batches(row_groups=range(piece.begin, piece.end), columns=columns, batch_size=1024):
        yield from batch.to_pylist()


def _parquet(path: str) -> Any:
    _extra("pyarrow", path)
    parquet, errors = import_module("pyarrow.parquet"), import_module("pyarrow.lib")
    try:
        return parquet.ParquetFile(path)
    except errors.ArrowInvalid as error:
        raise FormatError(f"{path} is damaged, or no Parquet file: {error}") from error


def _extra(name: str, path: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(f"reading {path} needs the package `{name}`: pip install headrace[prepare]") from None
