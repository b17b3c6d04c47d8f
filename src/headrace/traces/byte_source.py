"""Bytes of a plain or gzip file, in pieces, with an end to everything: damage, bombs, endless lines."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase, FileIO
from pathlib import Path

from headrace.errors import FormatError

MAX_EXPANSION = 300
"""Traces shrink 10 to 40 times under gzip, nothing shrinks more than ~1030 times; beyond 300 a file is a bomb."""

EXPANSION_CHECKED_FROM_BYTES = 64 << 20
"""Small files may be as repetitive as they like."""

_GZIP_MAGIC = b"\x1f\x8b"


class ByteSource:
    """Reads `path` piece by piece. A damaged gzip stream ends early and sets `damaged`; a bomb raises FormatError."""

    def __init__(self, path: Path, stream: BufferedIOBase | FileIO, packed_bytes: int | None) -> None:
        self.path = path
        self.num_bytes = 0
        """Bytes handed out so far (after decompression)."""
        self.damaged = False
        self.is_packed = packed_bytes is not None
        self._stream = stream
        self._packed_bytes = packed_bytes

    def read_into(self, target: memoryview) -> int:
        """Fill at most the whole of `target`; 0 at the end of the file or where its damage begins."""
        try:
            num_bytes = self._stream.readinto(target)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.damaged = True
            return 0
        self.num_bytes += num_bytes
        if self._packed_bytes is not None and self.num_bytes > EXPANSION_CHECKED_FROM_BYTES:
            self._refuse_bomb(self._packed_bytes)
        return num_bytes

    def _refuse_bomb(self, packed_bytes: int) -> None:
        if self.num_bytes > MAX_EXPANSION * packed_bytes:
            raise FormatError(
                f"{self.path} grows from {packed_bytes:,} bytes to more than {self.num_bytes:,} "
                f"(over {MAX_EXPANSION} times): no trace does that; unpack it by hand if you trust it"
            )


@contextmanager
def open_bytes(path: Path) -> Iterator[ByteSource]:
    """Open for reading; gzip is told by its first two bytes, not by its name. Unreadable files raise FormatError."""
    try:
        with path.open("rb", buffering=0) as file:
            packed = file.read(2) == _GZIP_MAGIC
            file.seek(0)
        if packed:
            with gzip.open(path, "rb") as unpacked:
                yield ByteSource(path, unpacked, path.stat().st_size)
        else:
            with path.open("rb", buffering=0) as plain:
                yield ByteSource(path, plain, None)
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from error
