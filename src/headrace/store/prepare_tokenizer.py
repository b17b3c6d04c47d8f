"""The tokenizer somebody names: a tokenizer.json, a folder with one, or a name on the Hugging Face hub."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ConfigError, FormatError
from headrace.store.manifest import TOKENIZER_FILE

# What ends a document in the vocabularies of GPT-2 / Qwen / OLMo, Llama 3, Llama 2 / Mistral, and Gemma.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_HUB_TIMEOUT_S = 10.0
_COMPANIONS = ("tokenizer_config.json", "chat_template.jinja")


def find_tokenizer(where: str) -> Path:
    """The tokenizer.json that `where` names. A name is looked up on the hub, which needs a network."""
    path = Path(where)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if file.is_file():
        return file
    if path.is_dir() or path.suffix == ".json" or path.is_absolute():
        raise ConfigError(f"there is no {file}; name a tokenizer.json, a folder that holds one, or a name on the hub")
    return _from_hub(where)


def read_tokenizer(file: Path) -> str:
    """Its content. FormatError where it is no text."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{file} is no tokenizer.json: it is not UTF-8 text ({error.reason})") from None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error


def _from_hub(name: str) -> Path:
    """The hub's newest tokenizer.json under that name, or the one an earlier download left. HF_HUB_OFFLINE is kept.

    What says how it is used comes with it, into the same folder, if it is there.
    """
    hub = _extra("huggingface_hub")
    try:
        # Asked once: the download itself asks six times, for 24 s, before it says that there is no network.
        hub.get_hf_file_metadata(hub.hf_hub_url(name, TOKENIZER_FILE), timeout=_HUB_TIMEOUT_S)
        file = Path(hub.hf_hub_download(name, TOKENIZER_FILE))
        for companion in _COMPANIONS:
            with suppress(import_module("huggingface_hub.errors").EntryNotFoundError):
                hub.hf_hub_download(name, companion)
        return file
    except Exception as error:  # of the hub's own classes, the HTTP library's, ValueError for what can be no name
        try:
            return Path(hub.hf_hub_download(name, TOKENIZER_FILE, local_files_only=True))
        except Exception:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(
                f"{name!r} is no file or folder here, none that was downloaded before, and the hub does not answer to "
                f"that name: {reason}; name a tokenizer.json, a folder that holds one, or a name on the hub"
            ) from error


def parse_tokenizer(content: str, *, where: str) -> Any:
    """A `tokenizers.Tokenizer` that neither cuts nor fills documents. FormatError for what is none."""
    tokenizers = _extra("tokenizers")
    try:
        backend = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises bare Exception
        raise FormatError(f"{where} is no tokenizer that `tokenizers` can read: {error}") from error
    # Some files carry what a model's evaluation wanted.
    backend.no_truncation()
    backend.no_padding()
    return backend


def num_ids(backend: Any) -> int:
    """One more than the largest id: a vocabulary may have holes, and its dtype must hold the last one."""
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_of_document(backend: Any, *, tokenizer: Path, wanted: str | None) -> int:
    """The id that ends a document: `wanted`, what the tokenizer_config.json beside it says, or the one known name."""
    known = [name for name in _ENDS if backend.token_to_id(name) is not None]
    name = wanted or _configured_end(tokenizer) or (known[0] if len(known) == 1 else None)
    if name is None or (found := backend.token_to_id(name)) is None:
        problem = f"the tokenizer has no token {name!r}" if name else "it is not known which token ends a document"
        added = ", ".join(sorted(token.content for token in backend.get_added_tokens_decoder().values())[:20])
        raise ConfigError(f"{problem}; name it with --eod: {added or 'the vocabulary has no special token'}")
    return int(found)


def _configured_end(tokenizer: Path) -> str | None:
    file = tokenizer.with_name("tokenizer_config.json")
    try:
        end = msgspec.json.decode(file.read_bytes()).get("eos_token")
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, AttributeError):
        return None
    # A string, or what transformers makes of an added token.
    name = end.get("content") if isinstance(end, dict) else end
    if name is not None and not isinstance(name, str):
        raise FormatError(f"eos_token in {file} must be a token's text, got {name!r}; name the token with --eod")
    return name


def _extra(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(f"preparing text needs the package `{name}`: pip install headrace[prepare]") from None
