"""Bytes of a plain or gzip file, in pieces, with an end to everything: damage, bombs, endless lines."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from headrace.errors import FormatError

MAX_EXPANSION = 300
"""Traces shrink 10 to 40 times under gzip, nothing shrinks more than ~1030 times; beyond 300 a file is a bomb."""

EXPANSION_CHECKED_FROM_BYTES = 64 << 20
"""Small files may be as repetitive as they like."""

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_PACKED_PIECE_BYTES = 256 << 10


class ByteSource:
    """Reads a file piece by piece, unpacking gzip. Damage ends it early, after everything that could be unpacked."""

    def __init__(self, path: Path, file: FileIO, *, is_packed: bool) -> None:
        self.path = path
        self.file = file
        self.is_packed = is_packed
        self.size = os.fstat(file.fileno()).st_size
        """Of the file as it lies on disk, bytes."""
        self.num_bytes = 0
        """Bytes handed out so far (after unpacking)."""
        self.damaged = False
        """The gzip stream is cut or corrupt."""
        self._unpacker = zlib.decompressobj(_GZIP_WINDOW)
        self._packed = b""
        self._packed_bytes = 0

    def read_into(self, target: memoryview) -> int:
        """Fill at most the whole of `target`; 0 at the end of the file or where its damage begins. Raises FormatError
        for a bomb."""
        if not self.is_packed:
            num_bytes = self.file.readinto(target) or 0
        else:
            data = self._unpack(len(target))
            num_bytes = len(data)
            target[:num_bytes] = data
        self.num_bytes += num_bytes
        if self.is_packed and self.num_bytes > EXPANSION_CHECKED_FROM_BYTES:
            self._refuse_bomb()
        return num_bytes

    def _unpack(self, limit: int) -> bytes:
        """Between 1 and `limit` bytes; empty at the end. A file may consist of several gzip streams."""
        while not self.damaged:
            if not self._packed:
                self._packed = self.file.read(_PACKED_PIECE_BYTES) or b""
                self._packed_bytes += len(self._packed)
            if self._unpacker.eof:
                if not self._packed.startswith(_GZIP_MAGIC):
                    return b""  # the end, or padding behind it
                self._unpacker = zlib.decompressobj(_GZIP_WINDOW)
            try:
                data = self._unpacker.decompress(self._packed, limit)
            except zlib.error:
                self.damaged = True
                return b""
            at_end = not self._packed and not data
            self._packed = self._unpacker.unconsumed_tail or self._unpacker.unused_data
            if data:
                return data
            if at_end and not self._unpacker.eof:
                self.damaged = True
        return b""

    def _refuse_bomb(self) -> None:
        if self.num_bytes > MAX_EXPANSION * self._packed_bytes:
            raise FormatError(
                f"{self.path} grows from {self._packed_bytes:,} bytes to more than {self.num_bytes:,} "
                f"(over {MAX_EXPANSION} times): no trace does that; unpack it by hand if you trust it"
            )


@contextmanager
def open_bytes(path: Path) -> Iterator[ByteSource]:
    """Open for reading; gzip is told by its first two bytes, not by its name. Unreadable files raise FormatError."""
    try:
        with path.open("rb", buffering=0) as file:
            is_packed = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            yield ByteSource(path, file, is_packed=is_packed)
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from error
