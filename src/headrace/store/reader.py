"""Reads a token store: both files checked once at opening, tokens taken from the page cache."""

from __future__ import annotations

import errno
import hashlib
import io
import mmap
import os
import resource
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError, FormatError
from headrace.store.format import (
    BOUNDARY,
    HEADER_BYTES,
    LENGTH,
    POINTER,
    IndexHeader,
    decode_header,
    index_path,
    prefix_of,
    tokens_path,
)

# Long arrays are walked in pieces, so that checking a store costs no memory of its size.
_PIECE = 1 << 20

# What `fingerprint` looks at: enough evenly spread pieces to notice another corpus, few enough to cost milliseconds.
_SAMPLED_PIECES = 64
_SAMPLED_BYTES = 4096
# Both mappings hold one, and so does what is read with pread.
_DESCRIPTORS = 3


class TokenStore:
    """A .bin/.idx pair, open for reading. Sequences are counted from 0 to `num_sequences - 1`.

    Opening checks every field of the index (about 10 ms per million sequences) and raises FormatError with the file,
    what was needed and what was there; a missing or unreadable file is a ConfigError. With `walk_index=False` opening
    reads nothing of the index but its header, however long it is: each sequence is checked when it is read, and
    `num_tokens` counts up to the last one's end.

    What is promised when somebody changes the files afterwards: StoreWriter replaces files and never writes into
    them, so an open store keeps what it opened. If another program truncates the .bin file in place, `read_into`
    raises FormatError (it reads, it does not map); views from `read` are mapped, and touching one beyond the new end
    is a SIGBUS. The same holds for the pointers in the .idx file; `lengths` is a copy, unless the index is not walked.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, walk_index: bool = True) -> None:
        self.prefix = prefix_of(prefix)
        index_file = index_path(self.prefix)
        self._tokens_path = tokens_path(self.prefix)
        with _explained(self.prefix), _open(index_file, self.prefix) as index_stream:
            self._index = _map(index_stream)
            header = decode_header(bytes(self._index[:HEADER_BYTES]), path=index_file)
            _check_index_size(header, len(self._index), index_file)
            with _open(self._tokens_path, self.prefix) as tokens_stream:
                raw_tokens = _map(tokens_stream)
                self._descriptor = os.dup(tokens_stream.fileno())
            self._close = weakref.finalize(self, os.close, self._descriptor)
            _check_still_there(index_stream, index_file)
        self._header = header
        self._tokens_bytes = len(raw_tokens)
        self._tokens = np.frombuffer(raw_tokens, header.dtype, len(raw_tokens) // header.dtype.itemsize)

        self.dtype: np.dtype[Any] = header.dtype
        """Dtype of the token ids on disk."""
        self.num_sequences = header.num_sequences
        self.num_documents = header.num_boundaries - 1
        self._walked = walk_index
        self.lengths: npt.NDArray[np.int32] = np.frombuffer(
            self._index, LENGTH, header.num_sequences, header.lengths_at
        )
        """Tokens per sequence, int32 [num_sequences], read-only."""
        if walk_index:
            # A copy: at offset 34 the array is unaligned, and NumPy would copy all of it again in every `take`.
            self.lengths = self.lengths.copy()
            self.lengths.flags.writeable = False
        self.document_boundaries: npt.NDArray[np.int64] = np.frombuffer(
            self._index, BOUNDARY, header.num_boundaries, header.boundaries_at
        )
        """First sequence of each document and, at the end, `num_sequences`: int64 [num_documents + 1], read-only."""
        self.pointers: npt.NDArray[np.int64] = np.frombuffer(
            self._index, POINTER, header.num_sequences, header.pointers_at
        )
        """Byte of the .bin file where each sequence starts, int64 [num_sequences], read-only, mapped, not aligned."""

        if walk_index:
            _check_lengths(self.lengths, index_file)
            _check_boundaries(self.document_boundaries, self.num_sequences, index_file)
            _check_pointers(self.pointers, self.lengths, header, self._tokens_bytes, index_file)
            self.num_tokens = int(self.lengths.sum(dtype=np.int64))
        else:
            self.num_tokens = self._require_sound(self.num_sequences - 1) if self.num_sequences else 0

    def __len__(self) -> int:
        """Number of sequences."""
        return self.num_sequences

    def __repr__(self) -> str:
        return (
            f"TokenStore({self.prefix!r}, {self.num_sequences:,} sequences, {self.num_tokens:,} tokens, {self.dtype})"
        )

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Tokens [offset, offset + length) of a sequence: a read-only view of the mapped file.

        `length` None means up to the sequence's end. Raises ConfigError if the tokens asked for do not exist.
        """
        start, count = self._locate(sequence, offset, length)
        first = start // self.dtype.itemsize
        return self._tokens[first : first + count]

    def read_into(self, out: npt.NDArray[Any], sequence: int, offset: int = 0, length: int | None = None) -> int:
        """Copy tokens [offset, offset + length) of a sequence to the front of `out`; returns how many.

        `out` is 1-D, C-contiguous and writable. In the store's dtype the bytes go from the page cache straight into
        it; a wider integer dtype costs one more pass; a narrower one is a ConfigError. Raises FormatError if the file
        has become shorter. May block on the disk.
        """
        start, count = self._locate(sequence, offset, length)
        if count == 0:
            return 0
        if out.ndim != 1 or len(out) < count:
            raise ConfigError(f"the destination must be 1-D with room for {count:,} tokens, got shape {out.shape}")
        if out.dtype == self.dtype:
            self._pread(out[:count], start)
            return count
        if not np.can_cast(self.dtype, out.dtype, "safe"):
            raise ConfigError(f"{self._tokens_path} holds {self.dtype}, which does not fit into {out.dtype} rows")
        narrow = np.empty(count, self.dtype)
        self._pread(narrow, start)
        out[:count] = narrow
        return count

    @cached_property
    def token_id_range(self) -> tuple[int, int]:
        """Smallest and largest token id of the store, (0, -1) if it is empty. Reads the whole .bin file, once."""
        lowest, highest = 0, -1
        for start in range(0, len(self._tokens), _PIECE):
            piece = self._tokens[start : start + _PIECE]
            low, high = int(piece.min()), int(piece.max())
            lowest, highest = (low, high) if start == 0 else (min(lowest, low), max(highest, high))
        return lowest, highest

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raise ConfigError unless every token id lies in [0, vocab_size). Reads the whole .bin file, once."""
        lowest, highest = self.token_id_range
        if lowest < 0 or highest >= vocab_size:
            culprit = lowest if lowest < 0 else highest
            raise ConfigError(
                f"{self._tokens_path} holds token id {culprit}, outside a vocabulary of {vocab_size} ids; "
                f"use the tokenizer the store was made with, or raise `vocab_size` to at least {highest + 1}"
            )

    def fingerprint(self) -> str:
        """32 hexadecimal digits that tell this store from others: a checkpoint keeps them to refuse a changed corpus.

        A digest of the header, both file sizes, and of 64 evenly spread pieces of 4 KiB of each file; the same on
        every machine, independent of path and time. An edit that keeps all sizes between the pieces is not seen.
        """
        digest = hashlib.sha256(self._header.encode())
        digest.update(f"{len(self._index)},{self._tokens_bytes}".encode())
        for position in _spread(len(self._index)):
            digest.update(self._index[position : position + _SAMPLED_BYTES])
        for position in _spread(self._tokens_bytes):
            digest.update(os.pread(self._descriptor, _SAMPLED_BYTES, position))
        return digest.hexdigest()[:32]

    def close(self) -> None:
        """Give the file descriptor back. Views stay valid: the mapping lives as long as they do. Idempotent."""
        self._descriptor = -1
        self._close()

    def __enter__(self) -> TokenStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _locate(self, sequence: int, offset: int, length: int | None) -> tuple[int, int]:
        """Byte position and count of the tokens asked for."""
        if not 0 <= sequence < self.num_sequences:
            raise ConfigError(f"{self.prefix} has sequences 0 to {self.num_sequences - 1}, asked for {sequence}")
        available = int(self.lengths[sequence])
        count = available - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > available:
            raise ConfigError(
                f"sequence {sequence} of {self.prefix} has {available} tokens, asked for {count} from {offset} on"
            )
        if not self._walked:
            self._require_sound(sequence)
        return int(self.pointers[sequence]) + offset * self.dtype.itemsize, count

    def _require_sound(self, sequence: int) -> int:
        """Where a sequence ends, in tokens. FormatError unless it starts on a whole token and ends inside the .bin."""
        start, length, itemsize = int(self.pointers[sequence]), int(self.lengths[sequence]), self.dtype.itemsize
        end = start + length * itemsize
        if start < 0 or length < 0 or start % itemsize or end > self._tokens_bytes:
            raise FormatError(
                f"{index_path(self.prefix)}: sequence {sequence} has {length} tokens from byte {start} on; it must "
                f"start on a multiple of {itemsize} and end in the {self._tokens_bytes} bytes of {self._tokens_path}"
            )
        return end // itemsize

    def _pread(self, out: npt.NDArray[Any], position: int) -> None:
        """Fill `out` from byte `position` on. A read cannot be killed by SIGBUS, and needs no file position."""
        room = out.data.cast("B")
        done = 0
        while done < len(room):
            got = os.preadv(self._descriptor, [room[done:]], position + done)
            if got == 0:
                raise FormatError(
                    f"{self._tokens_path} has become shorter than its index says: {len(room):,} bytes needed at byte "
                    f"{position:,}, {done:,} are left; restore the file or build the store again"
                )
            done += got


def _open(path: str, prefix: str) -> io.FileIO:
    try:
        return open(path, "rb", buffering=0)
    except FileNotFoundError:
        raise ConfigError(
            f"no token store at {prefix!r}: {path} does not exist; give the path of the pair without .bin or .idx"
        ) from None


@contextmanager
def _explained(prefix: str) -> Iterator[None]:
    """What keeps this process from opening a pair, and the limit to raise if it is one."""
    try:
        yield
    except OSError as error:
        what = prefix if error.filename is None else error.filename
        if error.errno != errno.EMFILE:
            raise ConfigError(f"{what} cannot be read: {error.strerror}") from error
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise ConfigError(
            f"{what} cannot be opened: an open store needs {_DESCRIPTORS} descriptors, and this process has used up "
            f"its {limit:,}; raise RLIMIT_NOFILE (`ulimit -n`)"
        ) from error


def _map(stream: io.FileIO) -> mmap.mmap | bytes:
    """The whole file, mapped read-only; an empty file cannot be mapped and is empty bytes."""
    if os.fstat(stream.fileno()).st_size == 0:
        return b""
    return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _check_still_there(index_stream: io.FileIO, path: str) -> None:
    """StoreWriter removes the old index before it renames the new .bin: an index that stayed belongs to its .bin."""
    try:
        same = os.path.samestat(os.fstat(index_stream.fileno()), os.stat(path))
    except FileNotFoundError:
        same = False
    if not same:
        raise FormatError(f"{path} is being replaced by another process at this moment; open the store again")


def _check_index_size(header: IndexHeader, nbytes: int, path: str) -> None:
    if nbytes not in (header.nbytes, header.nbytes_multimodal):
        what = "truncated" if nbytes < header.nbytes else "longer than its header explains"
        raise FormatError(
            f"{path} is {what}: {header.num_sequences:,} sequences and {header.num_boundaries:,} document boundaries "
            f"need {header.nbytes:,} bytes, it has {nbytes:,}"
        )


def _check_lengths(lengths: npt.NDArray[np.int32], path: str) -> None:
    if len(lengths) and int(lengths.min()) < 0:
        culprit = int(lengths.argmin())
        raise FormatError(f"{path}: sequence {culprit} has length {int(lengths[culprit])}, a length is never negative")


def _check_pointers(
    pointers: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32], header: IndexHeader, tokens_bytes: int, path: str
) -> None:
    """Every sequence starts on a whole token, not before the one before it ends, and inside the .bin file."""
    itemsize = header.dtype.itemsize
    end = 0
    for first in range(0, len(pointers), _PIECE):
        starts = pointers[first : first + _PIECE].astype(np.int64)
        nbytes = lengths[first : first + _PIECE].astype(np.int64) * itemsize
        # First of all, so that no sum below can wrap around.
        if int(starts.max()) > tokens_bytes:
            last = int(starts.argmax())
            raise _bin_too_short(path, int(starts[last]) + int(nbytes[last]), tokens_bytes)
        earliest = np.concatenate(([end], starts[:-1] + nbytes[:-1]))
        if (wrong := np.flatnonzero((starts < earliest) | (starts % itemsize != 0))).size:
            at = int(wrong[0])
            raise FormatError(
                f"{path}: sequence {first + at} starts at byte {int(starts[at])}, but must start on a multiple of "
                f"{itemsize} at or after byte {int(earliest[at])}, where the one before it ends"
            )
        end = int(starts[-1] + nbytes[-1])
    if end > tokens_bytes:
        raise _bin_too_short(path, end, tokens_bytes)


def _bin_too_short(path: str, need: int, have: int) -> FormatError:
    return FormatError(f"{tokens_path(prefix_of(path))} is too short: {path} needs {need:,} bytes, it has {have:,}")


def _check_boundaries(boundaries: npt.NDArray[np.int64], num_sequences: int, path: str) -> None:
    if int(boundaries[0]) != 0 or int(boundaries[-1]) != num_sequences:
        raise FormatError(
            f"{path}: document boundaries must run from 0 to {num_sequences} (the number of sequences), "
            f"they run from {int(boundaries[0])} to {int(boundaries[-1])}"
        )
    for first in range(0, len(boundaries) - 1, _PIECE):
        piece = boundaries[first : first + _PIECE + 1]
        if (wrong := np.flatnonzero(piece[1:] < piece[:-1])).size:
            at = first + int(wrong[0])
            raise FormatError(f"{path}: document {at} ends at sequence {int(boundaries[at + 1])}, before it starts")


def _spread(nbytes: int) -> Iterator[int]:
    """Start positions of evenly spread pieces, first and last byte included; all of a small file."""
    last = max(0, nbytes - _SAMPLED_BYTES)
    step = max(_SAMPLED_BYTES, last // (_SAMPLED_PIECES - 1))
    yield from range(0, last, step)
    yield last
