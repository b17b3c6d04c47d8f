"""What lies beside a pair and says what its ids mean.

    PREFIX.manifest.json  PREFIX.tokenizer.json      of this pair alone: what `prepare` leaves
    manifest.json         tokenizer.json             of the folder's one corpus: what `build_corpus` leaves

Readers look in this order. Both files are replaced as a whole and after the pair, the manifest last. A pair that
somebody else put in the place of the first one is told by its fingerprint: readers compare it. Megatron reads the pair
and nothing else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.errors import ConfigError, FormatError
from headrace.store.format import prefix_of
from headrace.store.reader import TokenStore

MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What every reader may rely on. Holds no times and no paths: same text, same bytes."""

    version: int
    fingerprint: str
    """`TokenStore.fingerprint()` of the pair."""
    tokenizer_sha256: str
    num_documents: int
    num_tokens: int
    """End-of-document ids included."""
    vocab_size: int
    eod: int | None
    """None: it is not known which id ends a document."""
    pad: int | None
    """An id that is in no document; None: none is known."""
    append_eod: bool
    """Each document that has tokens ends in `eod`."""
    dtype: str


AnyManifest = TypeVar("AnyManifest", bound=Manifest)


def read_manifest(prefix: str | os.PathLike[str]) -> Manifest | None:
    """The manifest beside the store `prefix`; None if there is none. Raises FormatError for one that is not ours."""
    return decode_manifest(beside(prefix, MANIFEST_FILE), Manifest)


def vocab_size_of(prefix: str | os.PathLike[str]) -> int:
    """How many ids a model of the pair at `prefix` needs, as its manifest says.

    Without a manifest of this very pair, the largest id + 1: reads the whole .bin file, and says too little where no
    document holds the last ids. ConfigError for a pair without tokens, FormatError for a manifest that is not ours.
    """
    manifest = read_manifest(prefix)
    with TokenStore(prefix) as store:
        if manifest is not None and manifest.fingerprint == store.fingerprint():
            return manifest.vocab_size
        if store.num_tokens == 0:
            raise ConfigError(
                f"nothing tells how many ids {store.prefix} needs: it holds no token and has no manifest of its own; "
                "make it with `headrace prepare`, or say the number yourself"
            )
        return store.token_id_range[1] + 1


def decode_manifest(path: Path, kind: type[AnyManifest]) -> AnyManifest | None:
    """A manifest with at least the fields of `kind`; None if there is no such file. FormatError for another file."""
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise FormatError(f"{path} is no manifest of a headrace corpus: {error}") from error
    if manifest.version != MANIFEST_VERSION:
        raise FormatError(f"{path} has version {manifest.version}, only version {MANIFEST_VERSION} can be read")
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of the file."""
    return msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"


def beside(prefix: str | os.PathLike[str], name: str) -> Path:
    """Where a reader finds a file about the pair: PREFIX.`name` if it is there, else `name` in the pair's folder."""
    own = of_pair(prefix, name)
    return own if own.is_file() else own.with_name(name)


def of_pair(prefix: str | os.PathLike[str], name: str) -> Path:
    """PREFIX.`name`: several pairs may lie in one folder."""
    return Path(f"{prefix_of(prefix)}.{name}")


def replace_file(path: Path, content: bytes) -> None:
    """Readers see the old content or the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
