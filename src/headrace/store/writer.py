"""Writes a token store, all or nothing."""

from __future__ import annotations

import os
import secrets
import shutil
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.store.format import (
    BOUNDARY,
    LENGTH,
    MAX_SEQUENCE_TOKENS,
    POINTER,
    IndexHeader,
    index_path,
    prefix_of,
    storable,
    tokens_path,
)
from headrace.store.reader import TokenStore

_COPIED_BYTES = 1 << 20


class StoreWriter:
    """Writes the pair PREFIX.bin / PREFIX.idx, byte for byte as megatron-core's IndexedDatasetBuilder does.

        with StoreWriter("corpus", np.uint16) as writer:
            writer.add_document([5, 6, 9])

    Both files grow under temporary names in the same folder. Leaving the block publishes them (flushed to the disk,
    the .bin file first; an older index goes away before that, so that no index ever describes another file's tokens);
    leaving it by an exception removes them and leaves an older pair untouched. Raises ConfigError if the folder is
    missing or cannot be written, or the disk is full. Memory: 12 bytes per sequence.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike = np.int32) -> None:
        self.prefix = prefix_of(prefix)
        self.dtype = storable(dtype)
        self.num_tokens = 0
        self._limits = np.iinfo(self.dtype)
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        folder, name = os.path.split(self.prefix)
        self._folder = folder or "."
        token = secrets.token_hex(8)
        self._temporary_tokens = os.path.join(self._folder, f".{name}.bin.{token}.tmp")
        self._temporary_index = os.path.join(self._folder, f".{name}.idx.{token}.tmp")
        with self._naming_errors():
            self._stream = open(self._temporary_tokens, "xb")  # noqa: SIM115 - closed by _publish or _abandon

    @property
    def num_sequences(self) -> int:
        """Sequences added so far."""
        return len(self._lengths)

    @property
    def num_documents(self) -> int:
        """Documents added so far, empty ones included."""
        return len(self._boundaries) - 1

    def add_document(self, ids: npt.ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Append one document: 1-D integers, one sequence, or cut into sequences of `lengths` tokens.

        An empty document adds a document boundary and no sequence, as in Megatron. Raises ConfigError if an id does
        not fit the dtype (Megatron wraps it silently) or `lengths` do not add up; nothing is appended then.
        """
        tokens = np.asarray(ids)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise ConfigError(f"a document is a 1-D array of integers, got shape {tokens.shape} of {tokens.dtype}")
        if lengths is None:
            lengths = [tokens.size] if tokens.size else []
        if sum(lengths) != tokens.size or min(lengths, default=0) < 0:
            raise ConfigError(f"sequence lengths add up to {sum(lengths)}, the document has {tokens.size} tokens")
        if (longest := max(lengths, default=0)) > MAX_SEQUENCE_TOKENS:
            raise ConfigError(f"a sequence has {longest:,} tokens, the format holds at most {MAX_SEQUENCE_TOKENS:,}")
        if tokens.size:
            self._require_fitting(tokens)
            with self._naming_errors():
                self._stream.write(np.ascontiguousarray(tokens, self.dtype).data)
        self._lengths.extend(lengths)
        self._boundaries.append(len(self._lengths))
        self.num_tokens += tokens.size

    def add_store(self, store: TokenStore) -> None:
        """Append every document of another store, as IndexedDatasetBuilder.add_index does, in pieces of 1 MiB.

        Raises ConfigError if its dtype is another one, or its .bin file holds more than the sequences.
        """
        if store.dtype != self.dtype:
            raise ConfigError(f"{store.prefix} holds {store.dtype}, and cannot be appended to a store of {self.dtype}")
        shift = len(self._lengths)
        with self._naming_errors(), open(tokens_path(store.prefix), "rb") as tokens:
            need, have = store.num_tokens * self.dtype.itemsize, os.fstat(tokens.fileno()).st_size
            if need != have:
                raise ConfigError(f"{tokens.name} has {have:,} bytes, its sequences {need:,}: gaps cannot be appended")
            shutil.copyfileobj(tokens, self._stream, _COPIED_BYTES)
        self._lengths.frombytes(store.lengths.astype(np.intc).tobytes())
        self._boundaries.frombytes((store.document_boundaries[1:].astype(np.longlong) + shift).tobytes())
        self.num_tokens += store.num_tokens

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        try:
            if exception_type is None:
                with self._naming_errors():
                    self._publish()
        finally:
            self._abandon()

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot write a token store at {self.prefix!r}: {error.strerror}; "
                "choose a prefix in a writable folder with room"
            ) from error

    def _require_fitting(self, tokens: npt.NDArray[Any]) -> None:
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < self._limits.min or highest > self._limits.max:
            culprit = lowest if lowest < self._limits.min else highest
            raise ConfigError(
                f"token id {culprit} does not fit {self.dtype}, which holds {self._limits.min} to {self._limits.max}; "
                f"choose a wider dtype (optimal_dtype(vocab_size) names one)"
            )

    def _publish(self) -> None:
        _sync_and_close(self._stream)
        lengths = np.frombuffer(self._lengths, np.intc).astype(LENGTH)
        nbytes = lengths.astype(POINTER) * self.dtype.itemsize
        pointers = np.zeros(len(lengths), POINTER)
        np.cumsum(nbytes[:-1], out=pointers[1:])
        header = IndexHeader(dtype=self.dtype, num_sequences=len(self._lengths), num_boundaries=len(self._boundaries))
        with open(self._temporary_index, "xb") as stream:
            stream.write(header.encode())
            stream.write(lengths.data)
            stream.write(pointers.data)
            stream.write(np.frombuffer(self._boundaries, np.longlong).astype(BOUNDARY).data)
            _sync_and_close(stream)
        _remove(index_path(self.prefix))
        os.replace(self._temporary_tokens, tokens_path(self.prefix))
        os.replace(self._temporary_index, index_path(self.prefix))
        _sync_folder(self._folder)

    def _abandon(self) -> None:
        """Remove what was not published. After a publication there is nothing left to remove."""
        with suppress(OSError):  # closing writes what is buffered, which a full disk refuses once more
            self._stream.close()
        _remove(self._temporary_tokens)
        _remove(self._temporary_index)


def _sync_and_close(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


def _sync_folder(folder: str) -> None:
    """Make the renames themselves survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
