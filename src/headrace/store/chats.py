"""Chats to text, and which of it is to be learnt: what the assistant says, not what it is told.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
    {"prompt": "...", "completion": "..."}          two texts, or two lists of messages

With a chat template of Hugging Face's tokenizers a list of messages is rendered as one text, of which the assistant's
parts are learnt. Without one, and for a prompt and a completion that are texts, contents follow each other as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.errors import ConfigError, FormatError

NO_TARGET = -100
"""The target of a token that is not to be learnt (headrace.packing.supervised)."""

Spans = list[tuple[int, int]]
"""Characters [begin, end) of a text."""

_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
# Templates that mark by themselves what is learnt.
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class NoChat(ValueError):
    """Why a record is none."""


class Said(NamedTuple):
    """A text of a chat; an end-of-document id follows it if it is learnt to its end."""

    text: str
    learnt: Spans


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFormat:
    """How messages become text."""

    template: str | None = None
    """Jinja, as in tokenizer_config.json; None: contents follow each other."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """What the template may name: bos_token, eos_token, ..."""

    def read(self, record: Mapping[str, Any], *, key: str) -> list[Said]:
        """The texts of a record. NoChat if it is none, or there is nothing to learn."""
        if key in record:
            said = self._of_messages(_checked(record[key], key), 0, record.get("tools"))
        elif isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
            said = [Said(record["prompt"], []), _all_of(record["completion"])]
        elif "prompt" in record and "completion" in record:
            prompt, completion = _checked(record["prompt"], "prompt"), _checked(record["completion"], "completion")
            said = self._of_messages([*prompt, *completion], len(prompt), record.get("tools"))
        else:
            raise NoChat(f"neither {key!r} nor 'prompt' and 'completion', only {', '.join(map(repr, record))}")
        if not any(begin < end for one in said for begin, end in one.learnt):
            raise NoChat("nothing to learn: the assistant says nothing")
        return said

    def _of_messages(self, messages: Sequence[Mapping[str, Any]], first: int, tools: Any) -> list[Said]:
        """`first`: what the assistant says before this message is told, not learnt."""
        if self.template is not None:
            try:
                return [self._rendered(messages, first, tools)]
            except NoChat:
                raise
            except Exception as error:  # whatever a template does with what it did not expect
                raise NoChat(f"the chat template refuses it: {error}") from error
        for number, message in enumerate(messages):
            if not isinstance(message.get("content"), str):
                raise NoChat(f"the content of message {number} is no text, and there is no chat template")
        return [
            _all_of(message["content"]) if _is_learnt(message, number, first) else Said(message["content"], [])
            for number, message in enumerate(messages)
        ]

    def _rendered(self, messages: Sequence[Mapping[str, Any]], first: int, tools: Any) -> Said:
        assert self.template is not None
        if _MARKS.search(self.template):
            text, marked = self._render(messages, tools, marks=True)
            told = len(self._render(messages[:first], tools)[0]) if first else 0
            return Said(text, [span for span in marked if span[0] >= told])
        text, _ = self._render(messages, tools)
        learnt = []
        for number, message in enumerate(messages):
            if not _is_learnt(message, number, first):
                continue
            before, _ = self._render(messages[:number], tools, asks=True)
            after, _ = self._render(messages[: number + 1], tools)
            if not (text.startswith(after) and after.startswith(before)):
                raise NoChat(
                    f"the chat template shows message {number} otherwise than as a continuation, so nobody knows what "
                    "is learnt of it: take a template with {% generation %} marks"
                )
            learnt.append((len(before), len(after)))
        return Said(text, learnt)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, *, asks: bool = False, marks: bool = False
    ) -> tuple[str, Spans]:
        """`asks`: up to where the assistant begins."""
        rendered, learnt = _renderer()(
            [list(messages)],
            tools=tools,
            chat_template=self.template,
            add_generation_prompt=asks,
            return_assistant_tokens_mask=marks,
            **self.special_tokens,
        )
        return rendered[0], learnt[0] if marks else []


def find_chat_format(tokenizer: Path, template: str | None) -> ChatFormat:
    """`template` is a file; None: the one beside `tokenizer`, a tokenizer.json, if there is one.

    ConfigError for a file that cannot be read, FormatError for a configuration that is none.
    """
    folder = tokenizer.parent
    config = _read_config(folder / _CONFIG_FILE)
    file = Path(template) if template is not None else folder / _TEMPLATE_FILE
    if template is not None or file.is_file():
        try:
            text: Any = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the chat template {file}: {error}") from error
    else:
        text = config.get("chat_template")
        if isinstance(text, list):  # several with names
            text = {one.get("name"): one.get("template") for one in text if isinstance(one, dict)}.get("default")
        if text is not None and not isinstance(text, str):
            raise FormatError(f"chat_template in {folder / _CONFIG_FILE} must be text, got {text!r}")
    if text is None:
        return ChatFormat()
    _renderer()
    # A string, or what transformers makes of an added token.
    named = {name: token.get("content") if isinstance(token, dict) else token for name, token in config.items()}
    tokens = {name: token for name, token in named.items() if name.endswith("_token") and isinstance(token, str)}
    return ChatFormat(template=text, special_tokens=tokens)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = msgspec.json.decode(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{file} is no configuration of a tokenizer: {error}") from error
    return config if isinstance(config, dict) else {}


def _checked(messages: Any, key: str) -> list[Mapping[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise NoChat(f"{key!r} is no list of messages")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise NoChat(f"message {number} is no object with a role and a content")
    return messages


def _is_learnt(message: Mapping[str, Any], number: int, first: int) -> bool:
    return number >= first and message["role"] == "assistant"


def _all_of(text: str) -> Said:
    return Said(text, [(0, len(text))])


def _renderer() -> Any:
    try:
        import_module("jinja2")
        return import_module("transformers.utils.chat_template_utils").render_jinja_template
    except ImportError as error:
        raise ConfigError(f"a chat template needs the package `{error.name}`: pip install headrace[chats]") from None
