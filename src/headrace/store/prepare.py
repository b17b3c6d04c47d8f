"""Text to a token store with a tokenizer that exists: plan, tokenise in parallel, join.

    PREFIX.parts/plan.json         what the parts are made of: inputs, tokenizer, options
    PREFIX.parts/00000.bin .idx    a part: some pieces of the inputs, tokenised
    PREFIX.parts/00000.json        its record, written last: a part with a record is finished
    PREFIX.bin .idx                all parts in order
    PREFIX.tokenizer.json          what the ids mean, and
    PREFIX.manifest.json           what ends a document (see manifest.py); then the folder of the parts goes away

The parts and their order follow from the inputs alone, so any number of processes writes the same bytes. What was
finished when a run was killed is kept, as long as the plan is the same. The bytes are those of Megatron's
tools/preprocess_data.py for the same token ids: one document per record, one sequence per text that has tokens, the
end-of-document id counted to the last sequence, and neither for a document without tokens.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import msgspec

from headrace.errors import ConfigError, FormatError
from headrace.store.format import index_path, optimal_dtype, prefix_of
from headrace.store.manifest import (
    MANIFEST_FILE,
    MANIFEST_VERSION,
    TOKENIZER_FILE,
    Manifest,
    encode_manifest,
    of_pair,
    replace_file,
)
from headrace.store.prepare_part import Part, PartRecord, PartWriter, TokenizerFacts
from headrace.store.prepare_tokenizer import end_of_document, find_tokenizer, num_ids, parse_tokenizer
from headrace.store.prepare_workers import write_parts
from headrace.store.reader import TokenStore
from headrace.store.records import BadRecord, Piece, find_inputs, pieces_of
from headrace.store.writer import StoreWriter

PLAN_VERSION = 1

# Enough parts for many cores to end together, of at least a second's work and at most half a minute's, which a kill
# may cost. From the inputs alone: a run may go on with another number of processes.
_NUM_PARTS = 256
_LEAST_PART_BYTES, _MOST_PART_BYTES = 1 << 20, 64 << 20
# What a run leaves in its folder: the plan, finished parts, and the temporary files of parts that it was writing.
_OURS = re.compile(r"plan\.json|\d{5,}\.(bin|idx|json)|\.\d{5,}\.\w+\..*tmp")
# What the report shows of what was not taken; all of it is counted.
MAX_BAD_SHOWN = 1000

Progress = Callable[[int, int], None]
"""Called with (bytes of input that are done, bytes in all)."""


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
    num_parts: int
    num_parts_kept: int
    """Finished by an earlier run that did not end."""
    replaced: bool
    """There was a pair of this name; it is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What decides the bytes of every part."""

    version: int
    tokenizer_sha256: str
    inputs: tuple[tuple[str, int, int], ...]
    """Path, bytes, and time of the last change in ns."""
    key: str
    eod: int | None
    part_bytes: int


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    prefix: str | os.PathLike[str],
    *,
    tokenizer: str,
    key: str = "text",
    append_eod: bool = False,
    eod: str | None = None,
    num_processes: int | None = None,
    part_bytes: int | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Tokenise files and folders (see records.py) into PREFIX.bin / PREFIX.idx. Blocks; minutes per gigabyte and core.

    A pair that is there is replaced, never reused. PREFIX.tokenizer.json and PREFIX.manifest.json are put beside it.

    `tokenizer` is a tokenizer.json, a folder with one, or a name on the hub; its special tokens are not added, and text
    that spells one is text. `eod` names the token `append_eod` appends. `num_processes` defaults to the cores this
    process may use; with 1, all is done in this process. `part_bytes` of input, by default 1 to 64 MiB, are what is
    done by one process and lost at most if it is killed. Raises ConfigError for what cannot be read or written, a
    document whose tokens the dtype cannot hold, or inputs without a token, FormatError for damaged files.
    """
    target = Path(prefix_of(prefix))
    files = find_inputs(inputs)
    part_bytes = part_bytes or _part_bytes(sum(file.stat().st_size for file in files))
    content = find_tokenizer(tokenizer)
    backend = parse_tokenizer(content, where=tokenizer)
    eod_id = end_of_document(backend, where=tokenizer, wanted=eod) if append_eod else None
    facts = TokenizerFacts(content=content, vocab_size=num_ids(backend), eod=eod_id, key=key)
    plan = Plan(
        version=PLAN_VERSION,
        tokenizer_sha256=hashlib.sha256(content.encode()).hexdigest(),
        inputs=tuple((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files),
        key=key,
        eod=eod_id,
        part_bytes=part_bytes,
    )
    parts = plan_parts((piece for file in files for piece in pieces_of(file, piece_bytes=part_bytes)), part_bytes)
    with _workshop(target) as folder:
        kept = _kept(folder, plan, parts)
        num_processes = num_processes or len(os.sched_getaffinity(0))
        _write_missing(folder, facts, parts, kept, num_processes=num_processes, progress=progress or _silent)
        records = [read_record(folder, part) for part in parts]
        replaced = Path(index_path(str(target))).exists()
        _join(folder, target, parts, records, facts)
        _describe(target, facts)
        _remove(folder)
    return _summary(target, records, facts, num_kept=len(kept), replaced=replaced)


def plan_parts(pieces: Iterator[Piece], part_bytes: int) -> list[Part]:
    """Consecutive pieces together until they have `part_bytes`: a part is worth starting a task for."""
    parts: list[Part] = []
    gathered: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        gathered.append(piece)
        num_bytes += piece.num_bytes
        if num_bytes >= part_bytes:
            parts.append(Part(number=len(parts), pieces=tuple(gathered)))
            gathered, num_bytes = [], 0
    if gathered:
        parts.append(Part(number=len(parts), pieces=tuple(gathered)))
    return parts


def _part_bytes(num_bytes: int) -> int:
    return max(_LEAST_PART_BYTES, min(num_bytes // _NUM_PARTS, _MOST_PART_BYTES))


def read_record(folder: Path, part: Part) -> PartRecord:
    """The record of a finished part."""
    return msgspec.json.decode((folder / f"{part.name}.json").read_bytes(), type=PartRecord)


@contextmanager
def _workshop(target: Path) -> Iterator[Path]:
    """The folder of the parts, for this process alone: the lock goes with the process, however it ends."""
    if not target.name:
        raise ConfigError(f"a prefix ends in a name, such as corpora/mine, got {str(target)!r}")
    folder = target.with_name(target.name + ".parts")
    try:
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(
            f"cannot work in {folder}: {error.strerror}; choose a prefix in a writable folder with room"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is preparing {target}; wait for it or choose another prefix") from None
        yield folder
    finally:
        os.close(lock)


def _kept(folder: Path, plan: Plan, parts: Sequence[Part]) -> set[int]:
    """Numbers of the parts that an earlier run of the same plan finished; what else it left goes.

    ConfigError for a folder that holds anything else: it is somebody's, and not ours to empty.
    """
    _refuse_foreign(folder)
    file, content = folder / "plan.json", msgspec.json.encode(plan)
    kept: set[int] = set()
    if file.is_file() and file.read_bytes() == content:
        kept = {part.number for part in parts if _is_finished(folder, part)}
    wanted = {f"{part.name}{end}" for part in parts if part.number in kept for end in (".bin", ".idx", ".json")}
    for path in folder.iterdir():
        if path.name not in wanted:
            path.unlink()
    try:
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; choose a prefix in a folder with room") from error
    return kept


def _refuse_foreign(folder: Path) -> None:
    foreign = sorted(path.name for path in folder.iterdir() if path.is_dir() or not _OURS.fullmatch(path.name))
    if foreign:
        raise ConfigError(
            f"{folder} holds {len(foreign)} files that are not parts of a run of ours, such as {foreign[0]!r}; "
            "choose another prefix, or move them away"
        )


def _remove(folder: Path) -> None:
    """What was made here, and no more: a file that somebody has put beside it meanwhile stays, with the folder."""
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()
    with suppress(OSError):
        folder.rmdir()


def _write_missing(
    folder: Path,
    facts: TokenizerFacts,
    parts: Sequence[Part],
    kept: set[int],
    *,
    num_processes: int,
    progress: Progress,
) -> None:
    total = sum(part.num_bytes for part in parts)
    done = sum(part.num_bytes for part in parts if part.number in kept)
    missing = [part for part in parts if part.number not in kept]
    progress(done, total)
    # Closed at once, not when somebody collects it: whoever is interrupted must not leave processes at work.
    with closing(
        write_parts(PartWriter(folder=str(folder), tokenizer=facts), missing, num_processes=num_processes)
    ) as written:
        for part in written:
            done += part.num_bytes
            progress(done, total)


def _is_finished(folder: Path, part: Part) -> bool:
    """It has a record, and its pair is whole: a damaged part is made again."""
    try:
        record = read_record(folder, part)
        with TokenStore(folder / part.name) as store:
            return store.num_tokens == record.num_tokens
    except (OSError, msgspec.DecodeError, ConfigError, FormatError):
        return False


def _join(
    folder: Path, target: Path, parts: Sequence[Part], records: Sequence[PartRecord], facts: TokenizerFacts
) -> None:
    if not any(record.num_tokens for record in records):
        bad = next(_numbered_in_files(records), None)
        first = f", the first is {bad.path}, line {bad.line}: {bad.reason}" if bad else ""
        raise ConfigError(f"the inputs hold no text: {sum(record.num_bad for record in records)} bad records{first}")
    with StoreWriter(target, optimal_dtype(facts.vocab_size)) as writer:
        for part in parts:
            with TokenStore(folder / part.name) as store:
                writer.add_store(store)


def _describe(target: Path, facts: TokenizerFacts) -> None:
    """What the ids of the pair mean, for its readers; the manifest last."""
    content = facts.content.encode()
    with TokenStore(target) as store:
        manifest = Manifest(
            version=MANIFEST_VERSION,
            fingerprint=store.fingerprint(),
            tokenizer_sha256=hashlib.sha256(content).hexdigest(),
            num_documents=store.num_documents,
            num_tokens=store.num_tokens,
            vocab_size=facts.vocab_size,
            eod=facts.eod,
            pad=None,
            append_eod=facts.eod is not None,
            dtype=store.dtype.name,
        )
    try:
        replace_file(of_pair(target, TOKENIZER_FILE), content)
        replace_file(of_pair(target, MANIFEST_FILE), encode_manifest(manifest))
    except OSError as error:
        raise ConfigError(
            f"the pair {target} stands, but {error.filename} cannot be written: {error.strerror}; "
            "make room or remove what is in the way, and run it again"
        ) from error


def _summary(
    target: Path, records: Sequence[PartRecord], facts: TokenizerFacts, *, num_kept: int, replaced: bool
) -> Prepared:
    return Prepared(
        prefix=str(target),
        num_documents=sum(record.num_documents for record in records),
        num_tokens=sum(record.num_tokens for record in records),
        num_empty=sum(record.num_empty for record in records),
        num_bad=sum(record.num_bad for record in records),
        bad=tuple(islice(_numbered_in_files(records), MAX_BAD_SHOWN)),
        dtype=optimal_dtype(facts.vocab_size).name,
        vocab_size=facts.vocab_size,
        eod=facts.eod,
        num_parts=len(records),
        num_parts_kept=num_kept,
        replaced=replaced,
    )


def _numbered_in_files(records: Sequence[PartRecord]) -> Iterator[BadRecord]:
    """Lines counted from the beginning of their file: a process knows only its own piece."""
    lines_before: dict[str, int] = {}
    for piece in chain.from_iterable(record.pieces for record in records):
        before = lines_before.get(piece.path, 0)
        for bad in piece.bad:
            yield BadRecord(path=bad.path, line=before + bad.line, reason=bad.reason)
        lines_before[piece.path] = before + piece.num_lines


def _silent(done: int, total: int) -> None:
    """No progress wanted."""
