"""Text to a token store with a tokenizer that exists: plan, tokenise in parallel, join.

    PREFIX.parts/plan.json         what the parts are made of: inputs, tokenizer, options
    PREFIX.parts/00000.bin .idx    a part: some pieces of the inputs, tokenised; of chats also 00000.targets.bin .idx
    PREFIX.parts/00000.json        its record, written last: a part with a record is finished
    PREFIX.bin .idx and others     what is left (prepare_joined.py); then the folder of the parts goes away

The parts and their order follow from the inputs alone, so any number of processes writes the same bytes. What was
finished when a run was killed is kept as long as the plan is the same, and so is all of it once a run has ended. The
bytes are those of Megatron's tools/preprocess_data.py for the same token ids: one document per record, one sequence per
text that has tokens, the end-of-document id counted to the last sequence, and neither for a document without tokens.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from headrace.errors import ConfigError, FormatError
from headrace.store.chats import find_chat_format
from headrace.store.format import index_path, prefix_of
from headrace.store.prepare_joined import Plan, Prepared, find_finished, finish, join
from headrace.store.prepare_part import TARGETS, Part, PartRecord, PartWriter, TokenizerFacts
from headrace.store.prepare_tokenizer import (
    end_of_document,
    find_tokenizer,
    num_ids,
    parse_tokenizer,
    read_tokenizer,
)
from headrace.store.prepare_workers import write_parts
from headrace.store.reader import TokenStore
from headrace.store.records import Piece, find_inputs, known_suffixes, pieces_of

PLAN_VERSION = 1

# Enough parts for many cores to end together, of at least a second's work and at most half a minute's, which a kill
# may cost. From the inputs alone: a run may go on with another number of processes.
_NUM_PARTS = 256
_LEAST_PART_BYTES, _MOST_PART_BYTES = 1 << 20, 64 << 20
# What a run leaves in its folder: the plan, finished parts, and the temporary files of parts that it was writing.
_OURS = re.compile(r"plan\.json|\d{5,}(\.targets)?\.(bin|idx|json)|\.\d{5,}\.\w+\..*tmp|\d{5,}\.json\.tmp")

Progress = Callable[[int, int], None]
"""Called with (bytes of input that are done, bytes in all)."""


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    prefix: str | os.PathLike[str],
    *,
    tokenizer: str,
    text_suffixes: Sequence[str] = (),
    key: str | None = None,
    append_eod: bool = False,
    eod: str | None = None,
    chats: bool = False,
    chat_template: str | None = None,
    force: bool = False,
    num_processes: int | None = None,
    part_bytes: int | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """Tokenise files and folders (see records.py) into PREFIX.bin / PREFIX.idx. Blocks; minutes per gigabyte and core.

    A pair that an earlier run made of the same inputs with the same options stays, and nothing is done, unless `force`;
    any other one is replaced. PREFIX.tokenizer.json and PREFIX.manifest.json are put beside it.

    `tokenizer` is a tokenizer.json, a folder with one, or a name on the hub; its special tokens are not added, and text
    that spells one is text. Files that end in one of `text_suffixes`, such as ".md", are plain text as .txt is. `eod`
    names the token `append_eod` appends. `key` is what holds a record's text, by default "text". With `chats` records
    are chats (see chats.py), and `key` holds the messages, by default "messages": PREFIX.targets.bin / .idx is the
    target of each token, -100 for nothing, and `eod` follows what the assistant says; `chat_template` is a file, by
    default what lies beside the tokenizer. `num_processes` defaults to the cores this process may use; with 1, all is
    done in this process. `part_bytes` of input, by default 1 to 64 MiB, are what is done by one process and lost at
    most if it is killed. Raises ConfigError for what cannot be read or written, a document whose tokens the dtype
    cannot hold, or inputs without a token, FormatError for damaged files.
    """
    target = Path(prefix_of(prefix))
    files = find_inputs(inputs, text_suffixes)
    facts = _tokenizer_facts(tokenizer, key, append_eod, eod, chats, chat_template)
    part_bytes = part_bytes or _part_bytes(sum(file.stat().st_size for file in files))
    plan = Plan(
        version=PLAN_VERSION,
        tokenizer_sha256=hashlib.sha256(facts.content.encode()).hexdigest(),
        inputs=tuple((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files),
        key=facts.key,
        eod=facts.eod,
        chats_sha256=hashlib.sha256(msgspec.json.encode(facts.chats)).hexdigest() if facts.chats else None,
        part_bytes=part_bytes,
        text_suffixes=known_suffixes(text_suffixes),
    )
    parts = plan_parts((piece for file in files for piece in pieces_of(file, piece_bytes=part_bytes)), part_bytes)
    with _workshop(target) as folder:
        finished = None if force else find_finished(target, plan)
        if finished is None:
            kept = _kept(folder, plan, parts, force=force)
            num_processes = num_processes or len(os.sched_getaffinity(0))
            _write_missing(folder, facts, parts, kept, num_processes=num_processes, progress=progress or _silent)
            records = [read_record(folder, part) for part in parts]
            replaced = Path(index_path(str(target))).exists()
            join(folder, target, parts, records, facts)
            finished = finish(target, plan, records, facts, num_kept=len(kept), replaced=replaced)
        _remove(folder)
    return finished


def _tokenizer_facts(
    tokenizer: str, key: str | None, append_eod: bool, eod: str | None, chats: bool, chat_template: str | None
) -> TokenizerFacts:
    if chat_template is not None and not chats:
        raise ConfigError(f"chat_template={chat_template!r} is for chats, which were not asked for")
    if eod is not None and not append_eod:
        raise ConfigError(f"eod={eod!r} names what append_eod appends, which was not asked for: add --append-eod")
    file = find_tokenizer(tokenizer)
    content = read_tokenizer(file)
    backend = parse_tokenizer(content, where=tokenizer)
    return TokenizerFacts(
        content=content,
        vocab_size=num_ids(backend),
        eod=end_of_document(backend, tokenizer=file, wanted=eod) if append_eod else None,
        key=key or ("messages" if chats else "text"),
        chats=find_chat_format(file, chat_template) if chats else None,
    )


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


def _kept(folder: Path, plan: Plan, parts: Sequence[Part], *, force: bool) -> set[int]:
    """Numbers of the parts that an earlier run of the same plan finished; what else it left goes.

    ConfigError for a folder that holds anything else: it is somebody's, and not ours to empty.
    """
    _refuse_foreign(folder)
    file, content = folder / "plan.json", msgspec.json.encode(plan)
    kept: set[int] = set()
    if not force and file.is_file() and file.read_bytes() == content:
        kept = {part.number for part in parts if _is_finished(folder, part, plan)}
    ends = (".bin", ".idx", ".json", *(f"{TARGETS}{end}" for end in (".bin", ".idx") if plan.chats_sha256))
    wanted = {f"{part.name}{end}" for part in parts if part.number in kept for end in ends}
    try:
        for path in folder.iterdir():
            if path.name not in wanted:
                path.unlink()
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"cannot write {file}: {error.strerror}; choose a prefix in a writable folder with room"
        ) from error
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


def _is_finished(folder: Path, part: Part, plan: Plan) -> bool:
    """It has a record, and its pairs are whole: a damaged part is made again."""
    try:
        num_tokens = [read_record(folder, part).num_tokens]
        for name in (part.name, f"{part.name}{TARGETS}")[: 1 + (plan.chats_sha256 is not None)]:
            with TokenStore(folder / name) as store:
                num_tokens.append(store.num_tokens)
        return len(set(num_tokens)) == 1
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError, FormatError):
        return False


def _silent(done: int, total: int) -> None:
    """No progress wanted."""
