"""What lies in this folder? Finds traces by what they are, not by what they are called, and reads only their heads.

In order: rank folders of Ascend's profiler, Kineto traces, merged cluster tables, tables of operations, records of
`headrace.measure`, training logs. The first kind that is found is what the folder is about; kinds of lower order
beside it (a log next to the traces) are left alone and named in a note; two kinds of ranks' traces are refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from headrace.errors import ConfigError, FormatError
from headrace.traces.ascend_cluster import FOLDER as CLUSTER_FOLDER
from headrace.traces.ascend_cluster import is_cluster_output
from headrace.traces.ascend_db import profiler_database
from headrace.traces.ascend_text import OUTPUT, output_folder
from headrace.traces.byte_source import open_bytes
from headrace.traces.op_table import is_op_table
from headrace.traces.records import is_records
from headrace.traces.training_log import is_training_log

InputKind: TypeAlias = Literal["kineto", "ascend_text", "ascend_db", "cluster", "op_table", "records", "training_log"]

OF_RANKS: tuple[InputKind, ...] = ("ascend_text", "ascend_db", "kineto")
ORDER: tuple[InputKind, ...] = (*OF_RANKS, "cluster", "op_table", "records", "training_log")

_HEAD_BYTES = 1 << 20
_RANK_TABLES = (
    "trace_view.json",
    "communication.json",
    "communication_matrix.json",
    "step_trace_time.csv",
    "analysis.db",
)
_PASSED_FOLDERS = {"__pycache__", ".git", "node_modules"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One file or folder to read."""

    kind: InputKind
    path: Path
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Walk:
    """What one way down the folders has met, inputs aside."""

    been_in: set[tuple[int, int]] = field(default_factory=set)
    """Device and inode of each folder: links may lead back up."""
    passed: list[str] = field(default_factory=list)
    """What the system refuses to say anything about: a link to itself, a folder nobody may look into."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What there is to read, and what was left out."""

    inputs: tuple[Input, ...]
    notes: tuple[str, ...]


def discover(paths: Sequence[Path]) -> Found:
    """Find everything to read under `paths`. Raises ConfigError for a path that does not exist, FormatError when
    nothing can be read or kinds are mixed."""
    inputs: list[Input] = []
    passed: list[str] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} does not exist; give files or folders with traces")
        walk = _Walk(passed=passed)
        found = list(_in_folder(path, walk) if path.is_dir() else _of_file(path))
        if not found:
            raise FormatError(_nothing(path))
        inputs += found
    unique = {entry.path.resolve(): entry for entry in inputs}
    found_all = _of_one_kind(tuple(unique.values()), paths)
    return replace(found_all, notes=found_all.notes + _note_of(passed))


def _note_of(passed: Sequence[str]) -> tuple[str, ...]:
    shown = ", ".join(passed[:3]) + (", ..." if len(passed) > 3 else "")
    return (f"passed over, because they cannot be looked at ({len(passed)}): {shown}",) if passed else ()


def _of_one_kind(inputs: tuple[Input, ...], paths: Sequence[Path]) -> Found:
    kinds = {entry.kind for entry in inputs}
    of_ranks = [kind for kind in OF_RANKS if kind in kinds]
    if len(of_ranks) > 1:
        examples = ", ".join(f"{kind} ({_first(inputs, kind)})" for kind in of_ranks)
        raise FormatError(
            f"{', '.join(map(str, paths))}: traces of different formats, {examples}; analyse one at a time"
        )
    chosen = next(kind for kind in ORDER if kind in kinds)
    rest = [entry for entry in inputs if entry.kind != chosen]
    others = "1 other input was" if len(rest) == 1 else f"{len(rest)} other inputs were"
    notes = [f"{others} left alone ({rest[0].kind}: {rest[0].path.name}, ...)"] if rest else []
    return Found(inputs=tuple(entry for entry in inputs if entry.kind == chosen), notes=tuple(notes))


def _first(inputs: Iterable[Input], kind: InputKind) -> Path:
    return next(entry.path for entry in inputs if entry.kind == kind)


def _in_folder(folder: Path, walk: _Walk) -> Iterator[Input]:
    """Walk down; a rank's folder and a cluster's folder are taken whole."""
    if folder.name == OUTPUT:  # the folder inside a rank's folder was given: the rank is told one level up
        folder = folder.parent
    status = folder.stat()
    if (status.st_dev, status.st_ino) in walk.been_in:
        return
    walk.been_in.add((status.st_dev, status.st_ino))
    if (rank_folder := _rank_folder(folder)) is not None:
        yield rank_folder
        return
    if is_cluster_output(folder):
        yield Input(kind="cluster", path=folder, num_bytes=_bytes_of(folder.iterdir()))
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise FormatError(f"cannot read {folder}: {error.strerror or error}") from error
    for entry in entries:
        try:
            is_folder, is_file = entry.is_dir(), entry.is_file()
        except OSError as error:
            walk.passed.append(f"{entry.path}: {error.strerror or error}")
            continue
        if is_folder and entry.name not in _PASSED_FOLDERS:
            yield from _in_folder(Path(entry.path), walk)
        elif is_file:
            yield from _of_file(Path(entry.path), must_be=False)


def _rank_folder(folder: Path) -> Input | None:
    """A folder of Ascend's profiler for one rank, told by its ASCEND_PROFILER_OUTPUT or by the tables in it."""
    output = output_folder(folder)
    tables = [output / name for name in _RANK_TABLES if (output / name).is_file()]
    database = profiler_database(folder)
    if not tables and database is None:
        is_metadata_only = any(folder.glob("profiler_info*.json"))
        return Input(kind="ascend_text", path=folder, num_bytes=0) if is_metadata_only else None
    has_timeline = (output / "trace_view.json").is_file()
    files = [*tables, *([database] if database else [])]
    kind: InputKind = "ascend_db" if database is not None and not has_timeline else "ascend_text"
    return Input(kind=kind, path=folder, num_bytes=_bytes_of(files))


def _of_file(path: Path, *, must_be: bool = True) -> Iterator[Input]:
    """The file as an input, if it is one; one that was named by hand must be."""
    tests: tuple[tuple[InputKind, Callable[[Path], bool]], ...] = (
        ("records", lambda file: file.suffix == ".jsonl" and is_records(file)),
        ("op_table", lambda file: ".csv" in file.suffixes and is_op_table(file)),
        ("training_log", lambda file: file.suffix in {".json", ".log", ".txt", ".out"} and is_training_log(file)),
        ("kineto", lambda file: (".json" in file.suffixes or ".gz" in file.suffixes) and _is_kineto(file)),
    )
    try:
        num_bytes = path.stat().st_size
        for kind, fits in tests:
            if fits(path):
                yield Input(kind=kind, path=path, num_bytes=num_bytes)
                return
    except (OSError, FormatError) as error:
        if must_be or ".json" in path.suffixes:
            raise FormatError(f"cannot read {path}: {error}") from error
        return
    if must_be and path.name in _RANK_TABLES:
        yield from _in_folder(path.parent, _Walk())
    elif must_be:
        raise FormatError(_nothing(path))


def _is_kineto(path: Path) -> bool:
    """Looks for `traceEvents` in the first MiB; a list of events is one too."""
    with open_bytes(path) as source:
        head = memoryview(bytearray(_HEAD_BYTES))
        text = bytes(head[: source.read_into(head)])
    return b'"traceEvents"' in text or (text.lstrip()[:1] == b"[" and b'"ph"' in text)


def _bytes_of(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())


def _nothing(path: Path) -> str:
    what = "is empty" if path.is_dir() and not any(path.iterdir()) else "holds no trace"
    return (
        f"{path} {what}: looked for Kineto traces (*.json, *.json.gz with traceEvents), Ascend rank folders "
        f"({OUTPUT}), {CLUSTER_FOLDER}, tables of operations, headrace records and training logs"
    )
