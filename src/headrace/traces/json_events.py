"""Streams the events of a trace file in batches: plain or gzip, whole or broken, of any size, in bounded memory.

A profiler's JSON is one object around a very long array (`traceEvents`), or just the array (Ascend's trace_view.json):

    { "schemaVersion": 1, ..., "traceEvents": [ {event}, {event}, ... ], "traceName": "...", ... }
      `------- head ---------------'            `-- a window at a time'    `------ tail ---------'

Only one window is held. It is cut at its last `}, {` and decoded in place with typed structs that skip every unknown
field. A wrong cut cannot pass unseen: inside a string or a nested list the decoder refuses what it gets. A batch that
is refused is taken apart event by event; events that cannot be decoded alone are skipped and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from headrace.errors import FormatError
from headrace.traces.byte_window import Window, open_window

EventT = TypeVar("EventT")

WINDOW_BYTES = 1 << 18
"""Bytes decoded at once. They fit the second-level cache: windows of 8 MiB cost a third more time."""

MAX_GLUED = 4
"""Pieces rejoined where something that looks like the border of two events lay inside one."""

NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What a decoder raises: for broken text, for broken letters, and for lists in lists in lists by the thousand."""

_ARRAY_START = re.compile(rb'"traceEvents"\s*:\s*\[|\A\s*\[')
_BORDER_BEFORE_KEY = re.compile(rb'(?<=\})\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|id|bp|s|args)"\s*:)')
_ARRAY_END = re.compile(rb'\}\s*\](?=\s*(?:,\s*"|\}|\Z))')  # starts with a letter, or it would be tried at every byte
_SEPARATORS = b" \t\r\n,"


class EventFile(Generic[EventT]):
    """Iterate once over batches (lists) of decoded events; afterwards `envelope`, `skipped`, `truncated` are complete.

    `event_types` are what an array element may be decoded as: the first that fits a whole batch is used, so a narrow
    and fast one may stand before a general one. `msgspec.Raw` fields point into the window and hold only until the
    next batch. Raises FormatError for a file that is no trace or cannot be read.
    """

    def __init__(self, path: Path, *event_types: type[EventT], window_bytes: int = WINDOW_BYTES) -> None:
        self.path = path
        self.envelope: dict[str, Any] = {}
        """All but the events. Complete only after the iteration: baseTimeNanoseconds may stand at the end."""
        self.skipped = 0
        """Events that could not be decoded: bad escapes, raw quotes, wrong encoding, endless nesting, cut off."""
        self.truncated = False
        """The file ends before its array does (the process was killed while writing, or a copy was cut)."""
        self._decoders = [msgspec.json.Decoder(list[event_type]) for event_type in event_types]  # type: ignore[valid-type]
        self._head = b""
        self._window_bytes = window_bytes

    def __iter__(self) -> Iterator[list[EventT]]:
        with open_window(self.path, self._window_bytes) as window:
            self._read_head(window)
            while window.fill():
                border = window.last_border()
                if border is None:
                    window.grow()
                    continue
                end, next_start = border
                events = window.decode(self._decode, end)
                if events is None and (ended := self._split_at_array_end(window.text())):
                    window.drop(len(window.text()))
                    yield ended[0]
                    self._set_envelope(ended[1] + window.read_rest())
                    return
                if events is None:
                    events, decided = self._salvage(window.text()[:end], may_continue=True)
                    next_start = next_start if decided == end else decided
                if next_start:
                    yield events
                    window.drop(next_start)
                else:
                    window.grow()
            yield self._finish(window.text())
            self.truncated |= window.damaged

    def read_head(self) -> dict[str, Any]:
        """What stands before the events; reads only that."""
        with open_window(self.path, min(self._window_bytes, 64 << 10)) as window:
            self._read_head(window)
        self._set_envelope(b"}")
        return self.envelope

    def _read_head(self, window: Window) -> None:
        """Consume the file up to the array's bracket."""
        while window.fill():
            text = window.text()
            if start := _ARRAY_START.search(text):
                self._head = text[: start.end()]
                window.drop(start.end())
                return
            window.grow()
        raise FormatError(f"{self.path} is no trace: its {len(window.text()):,} bytes hold no `traceEvents`")

    def _decode(self, array: bytes | memoryview) -> list[EventT] | None:
        for decoder in self._decoders:
            try:
                return decoder.decode(array)
            except NOT_JSON:
                continue
        return None

    def _split_at_array_end(self, text: bytes) -> tuple[list[EventT], bytes] | None:
        """(events, tail) if the array closes inside `text`: certain, because what stands before it decodes whole."""
        if text.lstrip().startswith(b"]"):
            return [], text.lstrip()[1:]
        for end in _ARRAY_END.finditer(text):
            events = self._decode(b"[" + text[: end.start() + 1] + b"]")
            if events is not None:
                return events, text[end.end() :]
        return None

    def _finish(self, text: bytes) -> list[EventT]:
        """The last events, and the envelope from whatever follows them."""
        if ended := self._split_at_array_end(text):
            events, tail = ended
            self.truncated = not self._set_envelope(tail)
            return events
        for end in _ARRAY_END.finditer(text):  # some event is broken: the array ends where a valid tail follows
            if self._set_envelope(text[end.end() :]):
                return self._salvage(text[: end.start() + 1], may_continue=False)[0]
        self.truncated = True
        self._set_envelope(b"")
        return self._salvage(text, may_continue=False)[0] if text.strip() else []

    def _salvage(self, text: bytes, *, may_continue: bool) -> tuple[list[EventT], int]:
        """Decode event by event; returns the good ones and how much of `text` is decided.

        Near the end of `text` a piece that does not decode may only have been cut inside an event. If the file
        continues, it is left for the next batch, where enough follows to decide.
        """
        borders = [border.span() for border in _BORDER_BEFORE_KEY.finditer(text)]
        starts = [0, *(end for _, end in borders)]
        ends = [*(start for start, _ in borders), len(text)]
        events: list[EventT] = []
        piece = 0
        while piece < len(starts):
            for last in range(piece, min(piece + MAX_GLUED, len(starts))):
                found = self._decode(b"[" + text[starts[piece] : ends[last]].strip(_SEPARATORS) + b"]")
                if found is not None:
                    events += found
                    piece = last + 1
                    break
            else:
                if may_continue and piece + MAX_GLUED > len(starts):
                    return events, starts[piece]
                self.skipped += 1
                piece += 1
        return events, len(text)

    def _set_envelope(self, tail: bytes) -> bool:
        """Parse head, empty array and tail as one object. Without a valid tail the head alone is kept."""
        if self._head.strip() == b"[":
            return not tail.strip()
        for closing in (tail, b"}"):
            try:
                self.envelope = msgspec.json.decode(self._head + b"]" + closing, type=dict[str, Any])
            except NOT_JSON:
                continue
            return closing is tail
        return False
