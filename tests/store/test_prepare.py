"""`headrace prepare`: the bytes Megatron writes, from every kind of file, whoever dies on the way."""

from __future__ import annotations

import errno
import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from headrace.errors import ConfigError, FormatError
from headrace.store import StoreWriter, TokenStore, bpe, build_corpus, load_tokenizer, read_manifest
from headrace.store.chats import find_chat_format
from headrace.store.prepare import plan_parts, prepare
from headrace.store.prepare_joined import Prepared
from headrace.store.prepare_tokenizer import end_of_document, find_tokenizer, parse_tokenizer, read_tokenizer
from headrace.store.records import BadRecord, Piece, Record, RecordReader, pieces_of
from tests.store.prepared_by_megatron import write_as_megatron

pytest.importorskip("tokenizers", reason="needs the extra prepare")

TEXTS = ["def mill(wheel):\n    return 'gründlich'", "", "<|endoftext|> is text", "水车 " * 30, "one\r\ntwo", " "]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small tokenizer that would cut and fill what it encodes, if it were let."""
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = import_module("tokenizers").Tokenizer.from_str(bpe.train(TEXTS * 4, vocab_size=300).to_json())
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    (folder / "tokenizer.json").write_text(backend.to_str())
    return folder


@pytest.fixture(scope="session")
def tokenize(tokenizer: Path) -> Any:
    own = bpe.Tokenizer(parse_tokenizer((tokenizer / "tokenizer.json").read_text(), where=""))
    return lambda text: own.encode_batch([text])[0]


def run(inputs: list[Path], prefix: Path, tokenizer: Path, **options: Any) -> Prepared:
    return prepare(inputs, prefix, tokenizer=str(tokenizer), **{"num_processes": 1, "append_eod": True, **options})


def pair(prefix: Path) -> tuple[bytes, bytes]:
    return prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()


def lines(documents: list[Any], key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": i, key: text}).encode() + b"\n" for i, text in enumerate(documents))


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("append_eod", [True, False])
def test_the_bytes_are_megatrons(tmp_path: Path, tokenizer: Path, tokenize: Any, ending: str, append_eod: bool) -> None:
    pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="needs megatron-core 0.16.1")
    write_as_megatron(
        tmp_path / "theirs",
        TEXTS,
        tokenize=tokenize,
        vocab_size=300,
        eod=bpe.END_OF_DOCUMENT_ID if append_eod else None,
    )
    file = tmp_path / f"texts{ending}"
    write_texts(file, TEXTS)
    made = run([file], tmp_path / "ours", tokenizer, append_eod=append_eod)
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")
    assert (made.num_documents, made.num_empty, made.num_bad, made.dtype) == (len(TEXTS), 1, 0, "uint16")
    assert not list(tmp_path.glob("ours.parts*"))


def write_texts(file: Path, texts: list[str]) -> None:
    raw = lines(texts)
    if file.name.endswith(".gz"):
        file.write_bytes(gzip.compress(raw))
    elif file.name.endswith(".zst"):
        # Two frames, as parallel compressors write.
        compress = pytest.importorskip("zstandard").ZstdCompressor().compress
        file.write_bytes(compress(raw[:40]) + compress(raw[40:]))
    elif file.name.endswith(".parquet"):
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"other": list(range(len(texts))), "text": texts}), file, row_group_size=4)
    else:
        file.write_bytes(raw)


def test_sentences_are_sequences_of_one_document(tmp_path: Path, tokenizer: Path, tokenize: Any) -> None:
    pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="needs megatron-core 0.16.1")
    documents: list[Any] = [["one", "", "two"], "three", [], ["", ""]]
    write_as_megatron(tmp_path / "theirs", documents, tokenize=tokenize, vocab_size=300, eod=0)
    (tmp_path / "x.jsonl").write_bytes(lines(documents, "body"))
    run([tmp_path / "x.jsonl"], tmp_path / "ours", tokenizer, key="body")
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")


def test_folders_are_taken_in_the_order_of_paths_and_any_number_of_processes_writes_the_same(
    tmp_path: Path, tokenizer: Path, tokenize: Any
) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "c.txt").write_bytes(b"last")
    (folder / "b" / "x.txt").write_bytes(b"middle\r\n")
    (folder / "a.jsonl").write_bytes(lines(TEXTS * 3))
    (folder / "readme.md").write_bytes(b"not taken")
    made = [run([folder], tmp_path / f"with{n}", tokenizer, num_processes=n, part_bytes=200) for n in (1, 2)]
    assert made[0].num_parts > 3
    assert pair(tmp_path / "with1") == pair(tmp_path / "with2")
    with TokenStore(tmp_path / "with2") as store:
        found = [store.read(i).tolist() for i in range(len(store))]
    assert found == [[*tokenize(text), 0] for text in [*(t for t in TEXTS * 3 if t), "middle\r\n", "last"]]


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=12),
    piece_bytes=st.integers(1, 80),
    end=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_every_line_is_read_once_wherever_a_file_is_cut(
    tmp_path: Path, texts: list[str], piece_bytes: int, end: bool
) -> None:
    file = tmp_path / "x.jsonl"
    raw = b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n\n" for text in texts)
    file.write_bytes(raw if end else raw.rstrip(b"\n"))
    readers = [RecordReader(piece, key="text") for piece in pieces_of(file, piece_bytes=piece_bytes)]
    found = [record for reader in readers for record in reader]
    assert [record.texts for record in found if isinstance(record, Record)] == [[text] for text in texts]
    assert sum(reader.num_lines for reader in readers) == len(file.read_bytes().splitlines())


ENDS = (".bin", ".idx", ".manifest.json", ".prepared.json", ".tokenizer.json")
BAD_LINES = [
    (b'{"text": "cut', "not JSON"),
    (b"[1, 2]", "a list, not an object"),
    (b'{"body": "x"}', "no key 'text', only 'body'"),
    (b'{"text": 7}', "'text' is a int, not text"),
    (b'{"text": null}', "'text' is a NoneType, not text"),
    (b'{"text": ["a", 1]}', "'text' is a list, not text"),
    (b'{"text": "\xff"}', "not JSON"),
]


@pytest.mark.parametrize("part_bytes", [30, 1 << 20])
def test_bad_records_are_counted_with_file_and_line(tmp_path: Path, tokenizer: Path, part_bytes: int) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b"".join(b'{"text": "good"}\n\n' + raw + b"\n" for raw, _ in BAD_LINES))
    made = run([file], tmp_path / "ours", tokenizer, part_bytes=part_bytes)
    assert (made.num_documents, made.num_bad) == (len(BAD_LINES), len(BAD_LINES))
    for number, (bad, (_, reason)) in enumerate(zip(made.bad, BAD_LINES, strict=True)):
        assert (bad.path, bad.line) == (str(file), 3 * number + 3)
        assert reason in bad.reason


def test_a_text_file_that_is_none_is_a_bad_record_at_its_line(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"one\ntwo\nthr\xe9e")
    [bad] = RecordReader(Piece(path=str(file), num_bytes=12), key="text")
    assert bad == BadRecord(path=str(file), line=3, reason="not UTF-8: byte 0xe9")


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_a_damaged_file_is_named_and_an_older_pair_stays(tmp_path: Path, tokenizer: Path, ending: str) -> None:
    with StoreWriter(tmp_path / "ours") as writer:
        writer.add_document([1, 2])
    before = pair(tmp_path / "ours")
    file = tmp_path / f"x{ending}"
    write_texts(file, [f"{i}: {os.urandom(40).hex()}" for i in range(40)])
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(FormatError, match=f"x{ending} is damaged"):
        run([file], tmp_path / "ours", tokenizer)
    assert pair(tmp_path / "ours") == before


def test_what_was_finished_is_kept_if_the_plan_is_the_same(tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(lines(TEXTS * 4))
    options = {"part_bytes": 100}
    whole = run([file], tmp_path / "whole", tokenizer, **options)

    class Interrupted(Exception):
        pass

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise Interrupted

    for changed in (False, True):
        with pytest.raises(Interrupted):
            run([file], tmp_path / "ours", tokenizer, progress=interrupt, force=changed, **options)
        if changed:
            os.utime(file, ns=(1, 1))
        (tmp_path / "ours.parts" / ".00000.bin.0123.tmp").write_bytes(b"left by a kill")
        made = run([file], tmp_path / "ours", tokenizer, **options)
        assert pair(tmp_path / "ours") == pair(tmp_path / "whole")
        assert made.num_parts == whole.num_parts
        assert (made.num_parts_kept > 1) == (not changed)


KILLED = """
import os, signal, sys
from headrace.store import prepare
if __name__ == "__main__":
    def progress(done, total):
        if done:
            os.kill(os.getpid(), signal.SIGKILL)
    prepare.prepare([sys.argv[1]], sys.argv[2], tokenizer=sys.argv[3], num_processes=2, part_bytes=400,
                    append_eod=True, progress=progress)
"""


@pytest.mark.parametrize("what", ["a file", "a folder", "the input itself"])
def test_a_folder_that_is_somebody_s_is_not_emptied(tmp_path: Path, tokenizer: Path, what: str) -> None:
    folder = tmp_path / "corpus.parts"
    folder.mkdir()
    source = (folder if what == "the input itself" else tmp_path) / "in.jsonl"
    source.write_bytes(lines(TEXTS))
    if what == "a file":
        (folder / "notes.md").write_text("mine")
    elif what == "a folder":
        (folder / "00000.bin").mkdir()
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigError, match="not parts of a run of ours"):
        run([source], tmp_path / "corpus", tokenizer)
    assert sorted(folder.iterdir()) == before


def test_a_damaged_part_is_made_again(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines(TEXTS * 40))
    run([source], tmp_path / "whole", tokenizer, part_bytes=2000)
    with monkeypatch.context() as interrupted:
        interrupted.setattr("headrace.store.prepare.join", _no_room)
        with pytest.raises(ConfigError, match="no room"):
            run([source], tmp_path / "corpus", tokenizer, part_bytes=2000)
    os.truncate(tmp_path / "corpus.parts" / "00001.bin", 10)
    done = run([source], tmp_path / "corpus", tokenizer, part_bytes=2000)
    assert done.num_parts_kept == done.num_parts - 1
    assert pair(tmp_path / "corpus") == pair(tmp_path / "whole")


def _no_room(*_: object) -> None:
    raise ConfigError("no room")


@pytest.mark.parametrize("prefix", ["", "."])
def test_a_prefix_is_a_name(tmp_path: Path, tokenizer: Path, prefix: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(lines(TEXTS))
    with pytest.raises(ConfigError, match="a prefix ends in a name"):
        prepare([source], prefix, tokenizer=str(tokenizer), num_processes=1)


def test_a_tokenizer_that_is_none_is_a_sentence(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "latin.json").write_bytes(b'{"\xe9": 1}')
    with pytest.raises(FormatError, match="not UTF-8"):
        read_tokenizer(tmp_path / "latin.json")
    content = (tokenizer / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": 5}')
    with pytest.raises(FormatError, match=r"eos_token in .* must be a token's text, got 5"):
        end_of_document(parse_tokenizer(content, where=""), tokenizer=tmp_path / "tokenizer.json", wanted=None)


def test_a_killed_run_leaves_no_process_and_goes_on(tmp_path: Path, tokenizer: Path) -> None:
    """The workers hold the pipe of stderr: it ends when the last one has left."""
    file, script = tmp_path / "x.jsonl", tmp_path / "killed.py"
    file.write_bytes(lines(TEXTS * 20))
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(file), str(tmp_path / "ours"), str(tokenizer)]
    killed = subprocess.run(command, stderr=subprocess.PIPE, timeout=100)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "ours.bin").exists()
    made = run([file], tmp_path / "ours", tokenizer, part_bytes=400)
    assert made.num_parts_kept >= 1
    run([file], tmp_path / "whole", tokenizer)
    assert pair(tmp_path / "ours") == pair(tmp_path / "whole")


KILLED_WHILE_JOINING = """
import os, signal, sys
from headrace.store import manifest, prepare
before, after = sys.argv[4:]
plainly = os.replace
def replace(source, target):
    if str(target).endswith(before):
        os.kill(os.getpid(), signal.SIGKILL)
    plainly(source, target)
    if after and str(target).endswith(after):
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace
prepare.prepare([sys.argv[1]], sys.argv[2], tokenizer=sys.argv[3], num_processes=1, part_bytes=900, append_eod=True)
"""


@pytest.mark.parametrize(
    ("before", "after", "is_done"),
    [
        ("00001.json", "", False),
        ("ours.bin", "", False),
        ("ours.idx", "", False),
        ("ours.tokenizer.json", "", False),
        ("ours.manifest.json", "", False),
        ("ours.prepared.json", "", False),
        ("nothing", "ours.prepared.json", True),
    ],
)
def test_a_run_that_is_killed_anywhere_is_finished_by_the_next(
    tmp_path: Path, tokenizer: Path, before: str, after: str, is_done: bool
) -> None:
    """kill -9 at each step that can be seen from outside; in the end there is what an undisturbed run leaves."""
    file, script = tmp_path / "x.jsonl", tmp_path / "killed.py"
    file.write_bytes(lines(TEXTS * 20))
    script.write_text(KILLED_WHILE_JOINING)
    command = [sys.executable, str(script), str(file), str(tmp_path / "ours"), str(tokenizer), before, after]
    killed = subprocess.run(command, stderr=subprocess.PIPE, timeout=100)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    made = run([file], tmp_path / "ours", tokenizer, part_bytes=900)
    assert made.unchanged == is_done
    if not is_done:
        assert made.num_parts_kept == (1 if before == "00001.json" else made.num_parts)
    run([file], tmp_path / "whole", tokenizer)
    assert pair(tmp_path / "ours") == pair(tmp_path / "whole")
    script.unlink()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"x.jsonl", *(f"{name}{end}" for name in ("ours", "whole") for end in ENDS)}


def test_the_same_again_does_nothing(tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(lines(TEXTS) + b"no JSON\n")
    made = run([file], tmp_path / "ours", tokenizer)
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}

    def never(done: int, total: int) -> None:
        pytest.fail("nothing is to be done")

    again = run([file], tmp_path / "ours", tokenizer, progress=never, num_processes=2)
    assert again == replace(made, unchanged=True)
    assert again.num_bad == 1
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before
    forced = run([file], tmp_path / "ours", tokenizer, force=True)
    assert (forced.unchanged, forced.replaced, forced.num_parts_kept) == (False, True, 0)


@pytest.mark.parametrize("what", ["input", "option", "tokens", "tokenizer", "manifest", "record", "another pair"])
def test_what_changed_since_is_done_again(tmp_path: Path, tokenizer: Path, what: str) -> None:
    file, ours = tmp_path / "x.jsonl", tmp_path / "ours"
    file.write_bytes(lines(TEXTS))
    run([file], ours, tokenizer)
    whole, options = pair(ours), {}
    if what == "input":
        os.utime(file, ns=(1, 1))
    elif what == "option":
        options = {"append_eod": False}
    elif what == "tokens":
        ours.with_suffix(".bin").write_bytes(b"")
    elif what == "tokenizer":
        (tmp_path / "ours.tokenizer.json").write_text("{}")
    elif what == "manifest":
        (tmp_path / "ours.manifest.json").unlink()
    elif what == "record":
        (tmp_path / "ours.prepared.json").write_text("{")
    else:
        with StoreWriter(ours, "uint16") as writer:
            writer.add_document([5, 6])
    made = run([file], ours, tokenizer, **options)
    assert not made.unchanged
    assert made.replaced
    assert (pair(ours) == whole) == (what != "option")
    assert run([file], ours, tokenizer, **options).unchanged


def test_a_killed_worker_is_named_and_what_was_finished_stays(tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(lines(TEXTS * 50))

    def kill_all(done: int, total: int) -> None:
        for child in multiprocessing.active_children() if done else ():
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(ConfigError, match="was killed, most likely for its memory; run it again with fewer processes"):
        run([file], tmp_path / "ours", tokenizer, num_processes=2, part_bytes=100, progress=kill_all)
    assert run([file], tmp_path / "ours", tokenizer, part_bytes=100).num_parts_kept >= 1


def test_two_runs_of_one_prefix_do_not_meet(tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(lines(TEXTS))

    def again(done: int, total: int) -> None:
        with pytest.raises(ConfigError, match="another process is preparing"):
            run([file], tmp_path / "ours", tokenizer)

    run([file], tmp_path / "ours", tokenizer, progress=again)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.txt", None, "there is no file or folder"),
        ("x.json", b"{}", "of no kind that can be read"),
        ("x.jsonl", b"", "the inputs hold no text: 0 bad records"),
        ("x.jsonl", b"[]\n", "the inputs hold no text: 1 bad record, the first is .*x.jsonl, line 1: a list"),
    ],
)
def test_inputs_without_text_are_refused(
    tmp_path: Path, tokenizer: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        run([tmp_path / name], tmp_path / "ours", tokenizer)


def test_the_end_of_a_document_is_what_is_wanted_configured_or_known(tmp_path: Path, tokenizer: Path) -> None:
    backend = parse_tokenizer((tokenizer / "tokenizer.json").read_text(), where="")
    assert end_of_document(backend, tokenizer=tmp_path / "tokenizer.json", wanted=None) == bpe.END_OF_DOCUMENT_ID
    assert end_of_document(backend, tokenizer=tmp_path / "tokenizer.json", wanted="<|padding|>") == bpe.PADDING_ID
    with pytest.raises(ConfigError, match=r"no token '<eos>'; name it with --eod: <\|endoftext\|>, <\|padding\|>"):
        end_of_document(backend, tokenizer=tmp_path / "tokenizer.json", wanted="<eos>")
    for end in ("<|padding|>", {"content": "<|padding|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        assert end_of_document(backend, tokenizer=tmp_path / "tokenizer.json", wanted=None) == bpe.PADDING_ID


def test_parts_are_consecutive_and_large_enough() -> None:
    pieces = [Piece(path=str(i), num_bytes=size) for i, size in enumerate([5, 5, 90, 100, 1, 1])]
    parts = plan_parts(iter(pieces), 100)
    assert [[piece.num_bytes for piece in part.pieces] for part in parts] == [[5, 5, 90], [100], [1, 1]]


def test_appending_a_store_is_megatrons_add_index(tmp_path: Path) -> None:
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="needs megatron-core 0.16.1")
    for name, documents in (("a", [[1, 2], [], [3]]), ("b", [[], [4, 5, 6]])):
        with StoreWriter(tmp_path / name, "uint16") as writer:
            for document in documents:
                writer.add_document(document)
    theirs = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=import_module("numpy").uint16)
    with StoreWriter(tmp_path / "ours", "uint16") as ours:
        for name in ("a", "b"):
            ours.add_store(TokenStore(tmp_path / name))
            theirs.add_index(str(tmp_path / name))
        assert ours.num_tokens == 6
    theirs.finalize(str(tmp_path / "theirs.idx"))
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")
    with StoreWriter(tmp_path / "wide", "int32") as wide, pytest.raises(ConfigError, match="cannot be appended"):
        wide.add_store(TokenStore(tmp_path / "a"))


def test_what_the_ids_mean_lies_beside_each_of_several_pairs(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines(TEXTS))
    build_corpus(write_folder(tmp_path / "folder"), tmp_path / "built", vocab_size=280)
    content = (tokenizer / "tokenizer.json").read_text()
    for prefix, append_eod in ((tmp_path / "ended", True), (tmp_path / "plain", False)):
        made = run([tmp_path / "x.jsonl"], prefix, tokenizer, append_eod=append_eod)
        manifest, found = read_manifest(prefix), load_tokenizer(prefix)
        assert manifest is not None
        assert found is not None
        assert manifest.fingerprint == TokenStore(prefix).fingerprint()
        assert (manifest.eod, manifest.append_eod) == ((0, True) if append_eod else (None, False))
        assert (manifest.num_tokens, manifest.vocab_size) == (made.num_tokens, made.vocab_size)
        assert Path(f"{prefix}.tokenizer.json").read_text() == content
        assert found.decode(TokenStore(prefix).read(0)) == TEXTS[0] + "<|endoftext|>" * append_eod
        names = {path.name for path in tmp_path.glob(f"*{prefix.name}*")}
        assert names == {f"{prefix.name}{end}" for end in ENDS}
    assert read_manifest(tmp_path / "built").num_documents == 1, "the folder-wide names are still those of its corpus"


def write_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.py").write_text("wheel = 'turns'\n")
    return folder


def test_a_manifest_of_the_pair_is_checked_as_every_file_is(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines(TEXTS))
    run([tmp_path / "x.jsonl"], tmp_path / "ours", tokenizer)
    file = tmp_path / "ours.manifest.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"version": 2}))
    with pytest.raises(FormatError, match=r"ours\.manifest\.json has version 2, only version 1"):
        read_manifest(tmp_path / "ours")
    del content["eod"]
    file.write_text(json.dumps(content))
    with pytest.raises(FormatError, match=r"ours\.manifest\.json is no manifest"):
        read_manifest(tmp_path / "ours")


def test_a_run_that_dies_before_the_manifest_is_finished_by_the_next(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.jsonl").write_bytes(lines(TEXTS))
    run([tmp_path / "x.jsonl"], tmp_path / "ours", tokenizer, append_eod=False)
    monkeypatch.setattr(os, "replace", full_disk_for("ours.manifest.json"))
    with pytest.raises(ConfigError, match=r"ours stands, but .*ours\.manifest\.json cannot be written: No space left"):
        run([tmp_path / "x.jsonl"], tmp_path / "ours", tokenizer)
    monkeypatch.undo()
    stale = read_manifest(tmp_path / "ours")
    assert stale is not None
    assert stale.fingerprint != TokenStore(tmp_path / "ours").fingerprint()
    again = run([tmp_path / "x.jsonl"], tmp_path / "ours", tokenizer)
    assert (again.num_parts_kept, again.replaced) == (1, True)
    assert read_manifest(tmp_path / "ours").fingerprint == TokenStore(tmp_path / "ours").fingerprint()
    assert not list(tmp_path.glob(".*")), "no half-written file stays"


def full_disk_for(name: str) -> Any:
    def replace(source: Any, target: Any, real: Any = os.replace) -> None:
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        real(source, target)

    return replace


def test_the_hub_is_asked_once_and_what_was_downloaded_before_is_taken(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = import_module("huggingface_hub")
    asked: list[str] = []

    def unreachable(url: str, *, timeout: float) -> None:
        asked.append(url)
        raise OSError("no network\nand more of it")

    def downloaded(name: str, file: str, *, local_files_only: bool = False) -> str:
        assert local_files_only, "the download would ask again, six times"
        return str(tokenizer / file)

    def nothing(name: str, file: str, *, local_files_only: bool = False) -> str:
        assert local_files_only
        raise FileNotFoundError

    monkeypatch.setattr(hub, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(hub, "hf_hub_download", downloaded)
    assert find_tokenizer("some/name") == tokenizer / "tokenizer.json"
    monkeypatch.setattr(hub, "hf_hub_download", nothing)
    with pytest.raises(ConfigError, match=r"'some/name' is no file or folder .* that name: no network; name"):
        find_tokenizer("some/name")
    assert len(asked) == 2


def test_a_name_on_the_hub_brings_what_says_how_its_tokenizer_is_used(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = import_module("huggingface_hub")
    there = {
        "tokenizer.json": (tokenizer / "tokenizer.json").read_text(),
        "tokenizer_config.json": '{"eos_token": "<|padding|>"}',
    }

    def downloaded(name: str, file: str) -> str:
        if file not in there:
            raise import_module("huggingface_hub.errors").EntryNotFoundError(file)
        (tmp_path / file).write_text(there[file])
        return str(tmp_path / file)

    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda url, *, timeout: None)
    monkeypatch.setattr(hub, "hf_hub_download", downloaded)
    file = find_tokenizer("some/name")
    backend = parse_tokenizer(read_tokenizer(file), where="some/name")
    assert end_of_document(backend, tokenizer=file, wanted=None) == bpe.PADDING_ID
    assert find_chat_format(file, None).template is None
    there["chat_template.jinja"] = "{{ messages }}"
    assert find_chat_format(find_tokenizer("some/name"), None).template == "{{ messages }}"


def test_the_verb_says_what_was_reused_and_what_replaced(tmp_path: Path, tokenizer: Path) -> None:
    from headrace.cli.app import app

    (tmp_path / "x.jsonl").write_bytes(lines(TEXTS))
    arguments = ["prepare", str(tmp_path / "x.jsonl"), "-o", str(tmp_path / "ours"), "-t", str(tokenizer)]
    said = [CliRunner().invoke(app, [*arguments, "--processes", "1"]).output for _ in range(2)]
    assert "all of it tokenised in this run\n" in said[0]
    assert "there already, of the same inputs, tokenizer and options: nothing to do" in said[1]
    forced = CliRunner().invoke(app, [*arguments, "--processes", "1", "--force"]).output
    assert "all of it tokenised in this run; the pair that was there is replaced\n" in forced

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([tmp_path / "x.jsonl"], tmp_path / "ours", tokenizer, append_eod=False, progress=interrupt, force=True)
    (tmp_path / "ours.prepared.json").unlink()
    went_on = CliRunner().invoke(app, [*arguments, "--processes", "1"]).output
    assert "went on: 1 of 1 parts were finished by an earlier run; the pair that was there is replaced\n" in went_on


def test_the_verb_reports_what_it_made(tmp_path: Path, tokenizer: Path) -> None:
    from headrace.cli.app import app

    (tmp_path / "x.jsonl").write_bytes(lines([*TEXTS, 7]))
    arguments = ["prepare", str(tmp_path / "x.jsonl"), "-o", str(tmp_path / "ours"), "-t", str(tokenizer)]
    arguments += ["--append-eod", "--processes", "1", "--json", str(tmp_path / "report.json")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "6 documents" in result.output
    assert "1 document is empty\n" in result.output
    assert "1 record is not in it:\n" in result.output
    assert "prepare: tokenise 0.0 MB\nprepare: join the parts\n" in result.output
    assert "x.jsonl, line 7: 'text' is a int, not text" in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["version"], report["num_bad"], report["num_empty"], report["eod"]) == (1, 1, 1, 0)
    assert report["bad"][0]["line"] == 7


def test_other_suffixes_are_plain_text_if_they_are_named(tmp_path: Path, tokenizer: Path, tokenize: Any) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "a.py").write_text("import mill")
    (folder / "b.md").write_text("# Mill")
    with pytest.raises(ConfigError, match=r"code holds no file that ends in \.txt, .*; --suffix names other endings"):
        run([folder], tmp_path / "ours", tokenizer)
    both = run([folder], tmp_path / "ours", tokenizer, text_suffixes=[".md", ".txt", ".py"])
    assert both.num_documents == 2
    with TokenStore(tmp_path / "ours") as store:
        found = [store.read(i).tolist() for i in range(2)]
    assert found == [[*tokenize(text), 0] for text in ("import mill", "# Mill")]
    assert run([folder / "b.md"], tmp_path / "one", tokenizer, text_suffixes=[".md"]).num_documents == 1


def test_another_suffix_is_another_job(tmp_path: Path, tokenizer: Path) -> None:
    """Also where it finds the same files."""
    (tmp_path / "x.md").write_text("mill")
    for suffixes, unchanged in (([".md"], False), ([".md", ".md"], True), ([".md", ".py"], False)):
        made = run([tmp_path / "x.md"], tmp_path / "ours", tokenizer, text_suffixes=suffixes)
        assert made.unchanged == unchanged


@pytest.mark.parametrize("suffix", ["md", ".", "", "./md", ".jsonl", ".x.parquet"])
def test_a_suffix_that_is_none_is_refused(tmp_path: Path, tokenizer: Path, suffix: str) -> None:
    (tmp_path / "x.md").write_text("mill")
    with pytest.raises(ConfigError, match="--suffix"):
        run([tmp_path / "x.md"], tmp_path / "ours", tokenizer, text_suffixes=[".md", suffix])
