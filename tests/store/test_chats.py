"""Chats to tokens and targets: what the assistant says is learnt and nothing else, as transformers renders it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import PackedTokens
from headrace.errors import ConfigError, FormatError
from headrace.feed import Feed
from headrace.packing import example_of_turns
from headrace.packing.layouts import IGNORED_LABEL
from headrace.store import TokenStore, bpe
from headrace.store.chats import NO_TARGET, ChatFormat, NoChat, find_chat_format
from headrace.store.prepare import prepare
from headrace.store.prepare_joined import Prepared

pytest.importorskip("tokenizers", reason="needs the extra prepare")

CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}|"
    "{% endgeneration %}{% else %}{{ message.content }}?{% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for message in messages %}{% if loop.last or message.role == 'user' %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>")


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


CHATS = [
    chat("What turns the mill?", "The wheel does."),
    chat("水车?", "gründlich <|im_end|>", "And then?", " Nothing. "),
    {"prompt": "two and two is", "completion": " four"},
    {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
    chat("Why?", "Because.", "And the end?"),
]
BAD = [
    (b"no JSON", "not JSON"),
    (b"[]", "a list, not an object"),
    (b'{"text": "a"}', "neither 'messages' nor 'prompt' and 'completion', only 'text'"),
    (b'{"messages": []}', "'messages' is no list of messages"),
    (b'{"messages": [{"content": "a"}]}', "message 0 is no object with a role and a content"),
    (b'{"messages": [{"role": "user", "content": "a"}]}', "nothing to learn: the assistant says nothing"),
    (b'{"messages": [{"role": "user", "content": 7}]}', "the content of message 0 is no text"),
    (b'{"prompt": "a", "completion": ["b"]}', "'prompt' is no list of messages"),
]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `save_pretrained` leaves one: special tokens, a configuration, no template yet."""
    folder = tmp_path_factory.mktemp("chat_tokenizer")
    texts = [json.dumps(one, ensure_ascii=False) for one in CHATS]
    backend = import_module("tokenizers").Tokenizer.from_str(bpe.train(texts * 4, vocab_size=320).to_json())
    backend.add_special_tokens(list(SPECIAL))
    (folder / "tokenizer.json").write_text(backend.to_str())
    bos = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "rstrip": False, "normalized": False}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def with_template(tokenizer: Path, folder: Path, template: str) -> Path:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return folder


def run(folder: Path, tokenizer: Path, records: list[Any], **options: Any) -> tuple[Prepared, list[Any], list[Any]]:
    """What was made: the report, and tokens and targets of each document."""
    raw = [
        record if isinstance(record, bytes) else json.dumps(record, ensure_ascii=False).encode() for record in records
    ]
    file = folder / "chats.jsonl"
    file.write_bytes(b"".join(line + b"\n" for line in raw))
    settings = {"tokenizer": str(tokenizer), "chats": True, "append_eod": True, "num_processes": 1, **options}
    made = prepare([file], folder / "chats", **settings)
    return made, documents(folder / "chats"), documents(folder / "chats.targets")


def documents(prefix: Path) -> list[Any]:
    with TokenStore(prefix) as store:
        return [store.read(sequence).tolist() for sequence in range(len(store))]


def parsed(tokenizer: Path, *, special: bool) -> bpe.Tokenizer:
    backend = import_module("tokenizers").Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return bpe.Tokenizer(backend, reads_special_tokens=special)


def test_without_a_template_contents_follow_each_other_and_the_assistant_ends_with_eod(
    tmp_path: Path, tokenizer: Path
) -> None:
    made, tokens, targets = run(tmp_path, tokenizer, CHATS)
    own = parsed(tokenizer, special=False)

    def turn(text: str, learnt: bool) -> tuple[list[int], bool]:
        [ids] = own.encode_batch([text])
        return ([*ids, bpe.END_OF_DOCUMENT_ID] if learnt else ids), learnt

    turns = [
        [turn(one["content"], one["role"] == "assistant") for one in record["messages"]]
        for record in (CHATS[0], CHATS[1], CHATS[4])
    ]
    turns.insert(2, [turn("two and two is", False), turn(" four", True)])
    turns.insert(3, [turn("a", False), turn("b", True)])
    expected = [example_of_turns(one) for one in turns]
    assert tokens == [ids.tolist() for ids, _ in expected]
    assert targets == [wanted.tolist() for _, wanted in expected]
    assert made.num_targets == sum(int((wanted != NO_TARGET).sum()) for _, wanted in expected)
    assert not made.has_chat_template
    assert NO_TARGET == IGNORED_LABEL


def test_a_template_renders_what_transformers_would_and_the_assistants_part_is_learnt(
    tmp_path: Path, tokenizer: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra chats")
    folder = with_template(tokenizer, tmp_path / "tokenizer", CHATML)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    made, tokens, targets = run(tmp_path, folder, CHATS)
    assert made.has_chat_template
    eod = bpe.END_OF_DOCUMENT_ID
    own = parsed(folder, special=True)
    for number in (0, 1, 3, 4):
        record = CHATS[number]
        messages = record.get("messages") or record["prompt"] + record["completion"]
        ends_learnt = messages[-1]["role"] == "assistant"
        rendered = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert tokens[number] == rendered + [eod] * ends_learnt
        learnt, previous = [], [NO_TARGET]
        for target in [*targets[number], NO_TARGET]:
            if target == NO_TARGET and previous[-1] != NO_TARGET:
                learnt.append(own.decode(previous[1:]))
                previous = [NO_TARGET]
            elif target != NO_TARGET:
                previous.append(target)
        said = [f"{one['content']}<|im_end|>\n" for one in messages if one["role"] == "assistant"]
        assert learnt == [*said[:-1], said[-1] + "<|endoftext|>" * ends_learnt]
    [prompt, completion] = own.encode_batch(["two and two is", " four"])
    assert tokens[2] == [*prompt, *completion, eod], "texts are not messages: no template"
    assert targets[2] == [NO_TARGET] * len(prompt) + [*completion, eod]


def test_a_template_that_marks_what_is_learnt_is_believed(tmp_path: Path, tokenizer: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra chats")
    template = tmp_path / "marked.jinja"
    template.write_text(MARKED)
    form = find_chat_format(tokenizer / "tokenizer.json", str(template))
    [said] = form.read(chat("a", "bc", "d", "ef"), key="messages")
    assert (said.text, [said.text[slice(*span)] for span in said.learnt]) == ("a?bc|d?ef|", ["bc|", "ef|"])
    record = {"prompt": chat("a", "bc", "d")["messages"], "completion": [{"role": "assistant", "content": "ef"}]}
    [said] = form.read(record, key="messages")
    assert [said.text[slice(*span)] for span in said.learnt] == ["ef|"], "what the prompt holds is told, not learnt"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (FORGETFUL, "shows message 1 otherwise than as a continuation"),
        ("{{ raise_exception('roles must alternate') }}", "the chat template refuses it: roles must alternate"),
        ("{{ messages[9].content + 1 }}", "the chat template refuses it: "),
    ],
)
def test_chats_that_a_template_does_not_show_are_none(template: str, reason: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra chats")
    with pytest.raises(NoChat, match=reason):
        ChatFormat(template=template).read(chat("a", "b", "c", "d"), key="messages")


@pytest.mark.parametrize("part_bytes", [60, 1 << 20])
def test_bad_lines_are_counted_with_file_and_line(tmp_path: Path, tokenizer: Path, part_bytes: int) -> None:
    records = [one for raw, _ in BAD for one in (CHATS[0], raw)]
    made, tokens, targets = run(tmp_path, tokenizer, records, part_bytes=part_bytes)
    assert len(tokens) == len(targets) == made.num_documents == made.num_bad == len(BAD)
    for number, (bad, (_, reason)) in enumerate(zip(made.bad, BAD, strict=True)):
        assert (bad.path, bad.line) == (str(tmp_path / "chats.jsonl"), 2 * number + 2)
        assert reason in bad.reason
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"1 bad record, the first is .*x\.txt, line 1: no chat"):
        prepare([tmp_path / "x.txt"], tmp_path / "text", tokenizer=str(tokenizer), chats=True, num_processes=1)


def test_rows_of_parquet_are_chats_too(tmp_path: Path, tokenizer: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    _, tokens, targets = run(tmp_path, tokenizer, [CHATS[0], CHATS[1]])
    column = [CHATS[0]["messages"], CHATS[1]["messages"]]
    parquet.write_table(arrow.table({"id": [1, 2], "said": column}), tmp_path / "x.parquet")
    options = {"tokenizer": str(tokenizer), "chats": True, "append_eod": True, "key": "said", "num_processes": 1}
    prepare([tmp_path / "x.parquet"], tmp_path / "rows", **options)
    assert (documents(tmp_path / "rows"), documents(tmp_path / "rows.targets")) == (tokens, targets)


KILLED = """
import os, signal, sys
from headrace.store.prepare import prepare
def progress(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
prepare([sys.argv[1]], sys.argv[2], tokenizer=sys.argv[3], chats=True, append_eod=True, num_processes=1, part_bytes=500,
        progress=progress)
"""


def test_a_killed_run_goes_on_and_the_same_again_does_nothing(tmp_path: Path, tokenizer: Path) -> None:
    whole = run(tmp_path, tokenizer, CHATS * 10)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(tmp_path / "chats.jsonl"), str(tmp_path / "again"), str(tokenizer)]
    assert subprocess.run(command, timeout=100).returncode == -9
    assert not (tmp_path / "again.targets.bin").exists()
    options = {"tokenizer": str(tokenizer), "chats": True, "append_eod": True, "part_bytes": 500}
    made = prepare([tmp_path / "chats.jsonl"], tmp_path / "again", num_processes=2, **options)
    assert made.num_parts > made.num_parts_kept > 1
    assert (documents(tmp_path / "again"), documents(tmp_path / "again.targets")) == whole[1:]
    assert prepare([tmp_path / "chats.jsonl"], tmp_path / "again", **options).unchanged
    assert not prepare([tmp_path / "chats.jsonl"], tmp_path / "again", **options | {"append_eod": False}).unchanged
    (tmp_path / "again.targets.idx").unlink()
    assert not prepare([tmp_path / "chats.jsonl"], tmp_path / "again", **options | {"append_eod": False}).unchanged


def test_they_are_fed_packed_and_whole_and_a_feed_goes_on(tmp_path: Path, tokenizer: Path) -> None:
    _, tokens, targets = run(tmp_path, tokenizer, CHATS * 6)
    prefix = str(tmp_path / "chats")
    source = PackedTokens(prefix, targets=f"{prefix}.targets", documents="whole", seq_length=64, num_epochs=2)
    learnt, rows, states = [], [], []
    with Feed(source) as feed:
        for batch in feed:
            kept = batch["loss_mask"][0] > 0
            learnt += batch["labels"][0][kept].tolist()
            rows.append(batch["tokens"].tolist())
            states.append(feed.state_dict())
    expected = [target for own in targets for target in own[1:] if target != NO_TARGET]
    assert sorted(learnt) == sorted(expected * 2), "each target once an epoch, but a first token"
    with Feed(source) as feed:
        feed.load_state_dict(states[2])
        assert [batch["tokens"].tolist() for batch in feed] == rows[3:]
    assert sum(map(len, tokens)) == TokenStore(prefix).num_tokens
    with TokenStore(f"{prefix}.targets") as store:
        assert store.dtype == np.int32


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chat_template": "nowhere.jinja"}, ConfigError, r"cannot read the chat template nowhere\.jinja"),
        ({"chats": False, "chat_template": "x"}, ConfigError, "chat_template='x' is for chats"),
    ],
)
def test_formats_without_a_meaning(
    tmp_path: Path, tokenizer: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path, tokenizer, CHATS, **options)


def test_a_template_is_found_where_tokenizers_keep_it(tmp_path: Path, tokenizer: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra chats")
    folder = with_template(tokenizer, tmp_path / "tokenizer", CHATML)
    assert find_chat_format(folder / "tokenizer.json", None).special_tokens["bos_token"] == "<s>"
    (folder / "chat_template.jinja").unlink()
    assert find_chat_format(folder / "tokenizer.json", None).template is None
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for kept in ("one", [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "one"}]):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": kept}))
        assert find_chat_format(folder / "tokenizer.json", None).template == "one"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(FormatError, match=r"chat_template in .* must be text, got 5"):
        find_chat_format(folder / "tokenizer.json", None)
