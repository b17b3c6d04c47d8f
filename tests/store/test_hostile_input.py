"""What nobody means, met by whoever prepares or opens a store: a sentence or a bad record, never a traceback."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConfigError, FormatError
from headrace.store import StoreWriter, TokenStore, bpe
from headrace.store.chats import ChatFormat, NoChat, find_chat_format
from headrace.store.prepare import prepare
from headrace.store.prepare_tokenizer import end_of_document
from headrace.store.records import BadRecord, Piece, Record, RecordReader

DEEP = b"[" * 100_000 + b"]" * 100_000
EMPTY_MARK = (
    "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}{% generation %}"
    "{% endgeneration %}{% endif %}{% endfor %}"
)
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The mill."}]
}


@pytest.mark.parametrize("chats", [None, ChatFormat()])
@pytest.mark.parametrize("before", [b"", b'{"text": ', b'{"messages": [], "more": '])
def test_a_line_nested_too_deeply_is_a_bad_record(tmp_path: Path, before: bytes, chats: ChatFormat | None) -> None:
    path = tmp_path / "x.jsonl"
    after = b"}" if before else b""
    path.write_bytes(before + DEEP + after + b'\n{"text": "a", "prompt": "b", "completion": "c"}\n')
    size = path.stat().st_size
    key = "text" if chats is None else "messages"
    first, second = RecordReader(Piece(path=str(path), end=size, num_bytes=size), key=key, chats=chats)
    assert first == BadRecord(path=str(path), line=1, reason="nested too deeply to be read")
    assert isinstance(second, Record)


def test_a_configuration_nested_too_deeply_is_none(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra prepare")
    (tmp_path / "tokenizer_config.json").write_bytes(b'{"eos_token": ' + DEEP + b"}")
    with pytest.raises(FormatError, match="is no configuration of a tokenizer"):
        find_chat_format(tmp_path / "tokenizer.json", None)
    own = import_module("tokenizers").Tokenizer.from_str(bpe.train(["a mill"], vocab_size=258).to_json())
    assert end_of_document(own, tokenizer=tmp_path / "tokenizer.json", wanted=None) == bpe.END_OF_DOCUMENT_ID


def test_a_chat_whose_marks_are_empty_has_nothing_to_learn() -> None:
    pytest.importorskip("transformers", reason="needs the extra chats")
    with pytest.raises(NoChat, match="nothing to learn"):
        ChatFormat(template=EMPTY_MARK).read(CHAT, key="messages")


def test_an_end_of_document_that_is_not_appended_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"eod='NOPE' names what append_eod appends.*add --append-eod"):
        prepare([tmp_path / "x.txt"], tmp_path / "x", tokenizer="none", eod="NOPE")
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def test_a_folder_of_parts_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra prepare")
    (tmp_path / "tokenizer.json").write_text(bpe.train(["a mill"], vocab_size=258).to_json())
    (tmp_path / "x.txt").write_text("text")
    (tmp_path / "x.parts").mkdir()
    (tmp_path / "x.parts" / "plan.json").write_text("{}")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ConfigError, match="Read-only file system; choose a prefix in a writable folder"):
        prepare([tmp_path / "x.txt"], tmp_path / "x", tokenizer=str(tmp_path), num_processes=1)


def test_processes_that_tokenise_are_born_deaf_to_an_interrupt(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra prepare")
    (tmp_path / "tokenizer.json").write_text(bpe.train(["a mill"], vocab_size=258).to_json())
    (tmp_path / "x.jsonl").write_text('{"text": "a mill"}\n' * 40)
    blocked: list[int] = []

    def look(done: int, total: int) -> None:
        for child in multiprocessing.active_children():
            status = Path(f"/proc/{child.pid}/status").read_text()
            blocked.append(int(status.split("SigBlk:")[1].split()[0], 16) >> (signal.SIGINT - 1) & 1)

    settings: dict[str, Any] = {"num_processes": 2, "part_bytes": 200, "progress": look}
    prepare([tmp_path / "x.jsonl"], tmp_path / "x", tokenizer=str(tmp_path), **settings)
    assert blocked
    assert all(blocked)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("room", range(5))
def test_a_process_without_descriptors_names_the_limit(tmp_path: Path, room: int) -> None:
    with StoreWriter(tmp_path / "x", "uint16") as writer:
        writer.add_document(np.arange(1, 9, dtype=np.uint16))
    lowest_free = os.dup(0)
    os.close(lowest_free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + room, hard))
    try:
        with pytest.raises(ConfigError) as caught:
            TokenStore(tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "an open store needs 3 descriptors, and this process has used up its" in str(caught.value)
    assert "raise RLIMIT_NOFILE (`ulimit -n`)" in str(caught.value)
