"""A view of some hundred kilobytes that moves through a file, and the JSON arrays that can be cut out of it in place.

    file    ...},{event},{event},{event},{eve|nt},{event},...
                [             window         ]
                [{event},{event},{event}]             <- decoded: `[` and `]` stand in for the separators around it

Plain files are mapped (privately: the brackets never reach the file), which saves a copy of every byte; gzip is
unpacked into a buffer. Either way only the window, and at most MAX_HELD_BYTES, is held.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TypeVar

from headrace.errors import FormatError
from headrace.traces.byte_source import ByteSource, open_bytes

Decoded = TypeVar("Decoded")

MAX_HELD_BYTES = 64 << 20
"""No event, head or tail of a trace is longer; it bounds what a malformed file can make us hold."""

MAPPED_AT_ONCE_BYTES = 8 << 20
"""Pages ahead are brought in, and those behind handed back, in pieces of this size: they count as memory of the process
meanwhile. Larger pieces are no faster."""

MADV_POPULATE_READ = 22
"""Linux 5.14. One call instead of a page fault per 64 KiB; and an error, not a SIGBUS, if the file was cut."""

_BORDER = re.compile(rb"\}\s*,\s*\{")
_OPEN, _CLOSE = ord("["), ord("]")


class Window:
    """What both kinds share: bytes [begin, end) of a buffer. `begin` is at least 1 once a file's head is dropped."""

    damaged = False
    """The file ends in the middle of its compression."""

    def __init__(self, path: Path, buffer: bytearray | mmap.mmap, num_bytes: int) -> None:
        self._path = path
        self._buffer = buffer
        self._num_bytes = num_bytes
        self._begin = self._end = 0

    def fill(self) -> bool:
        """Extend to the full width; False when the file gave nothing more."""
        raise NotImplementedError

    def drop(self, num_bytes: int) -> None:
        """Move on by so many bytes."""
        raise NotImplementedError

    def grow(self) -> None:
        """Double the width: one event (or the head) is longer. Raises FormatError beyond MAX_HELD_BYTES."""
        if self._num_bytes > MAX_HELD_BYTES:
            raise FormatError(f"{self._path} is no trace: {MAX_HELD_BYTES >> 20} MiB without the border of two events")
        self._num_bytes *= 2

    def text(self) -> bytes:
        """A copy of what is in view."""
        return bytes(self._buffer[self._begin : self._end])

    def read_rest(self) -> bytes:
        """Everything from here to the end of the file, up to the bound."""
        while self.fill() and self._num_bytes <= MAX_HELD_BYTES:
            self.grow()
        return self.text()

    def decode(self, decoder: Callable[[memoryview], Decoded], end: int) -> Decoded:
        """Decode the first `end` bytes as an array. There must be a byte before them, and a separator behind."""
        buffer, first, last = self._buffer, self._begin - 1, self._begin + end
        before, behind = buffer[first], buffer[last]
        buffer[first], buffer[last] = _OPEN, _CLOSE
        try:
            return decoder(memoryview(buffer)[first : last + 1])
        finally:
            buffer[first], buffer[last] = before, behind

    def last_border(self) -> tuple[int, int] | None:
        """(end of the last event before the last border in view, start of the next event)."""
        brace = self._end
        while (brace := self._buffer.rfind(b"}", self._begin, brace)) >= 0:
            if border := _BORDER.match(self._buffer, brace, self._end):
                return brace + 1 - self._begin, border.end() - 1 - self._begin
        return None


class MappedWindow(Window):
    """Over a plain file."""

    def __init__(self, path: Path, file: FileIO, num_bytes: int) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._released = self._populated = 0
        mapped = mmap.mmap(file.fileno(), self._size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        super().__init__(path, mapped, num_bytes)

    def fill(self) -> bool:
        before = self._end
        self._end = min(self._size, self._begin + self._num_bytes)
        if os.fstat(self._file.fileno()).st_size < self._end:  # touching what is gone would be SIGBUS
            raise FormatError(f"{self._path} was cut to less than {self._end:,} bytes while it was being read")
        if self._end > self._populated:
            self._populate()
        return self._end > before

    def _populate(self) -> None:
        assert isinstance(self._buffer, mmap.mmap)
        while self._populated < self._end:
            start, self._populated = self._populated, self._populated + MAPPED_AT_ONCE_BYTES
            with suppress(OSError):  # an older kernel: the pages come one by one
                self._buffer.madvise(MADV_POPULATE_READ, start, min(MAPPED_AT_ONCE_BYTES, self._size - start))

    def drop(self, num_bytes: int) -> None:
        self._begin += num_bytes
        behind = (self._begin - 1 - self._released) // MAPPED_AT_ONCE_BYTES * MAPPED_AT_ONCE_BYTES
        if behind:
            assert isinstance(self._buffer, mmap.mmap)
            self._buffer.madvise(mmap.MADV_DONTNEED, self._released, behind)
            self._released += behind


class UnpackedWindow(Window):
    """Over the bytes of a gzip file. Byte 0 of the buffer is kept for the `[`."""

    def __init__(self, path: Path, source: ByteSource, num_bytes: int) -> None:
        super().__init__(path, bytearray(1 + num_bytes), num_bytes)
        self._source = source
        self._begin = self._end = 1

    def fill(self) -> bool:
        before = self._end
        with memoryview(self._buffer) as view:
            while self._end < len(view) and (num_bytes := self._source.read_into(view[self._end :])):
                self._end += num_bytes
        self.damaged = self._source.damaged
        return self._end > before

    def grow(self) -> None:
        super().grow()
        # A new buffer, not a resize: Raw fields of the last batch may still point into the old one.
        larger = bytearray(1 + self._num_bytes)
        larger[: self._end] = self._buffer[: self._end]
        self._buffer = larger

    def drop(self, num_bytes: int) -> None:
        rest = self._buffer[1 + num_bytes : self._end]
        self._buffer[1 : 1 + len(rest)] = rest
        self._end = 1 + len(rest)


@contextmanager
def open_window(path: Path, num_bytes: int) -> Iterator[Window]:
    """A window of `num_bytes` at the start of the file. Raises FormatError for a file that cannot be read."""
    with open_bytes(path) as source:
        if source.is_packed or source.size == 0:
            yield UnpackedWindow(path, source, num_bytes)
        else:
            # Not closed by hand: Raw fields may outlive the loop, and the mapping lives as long as they do.
            yield MappedWindow(path, source.file, num_bytes)
