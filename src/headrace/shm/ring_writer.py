"""The writing end of the ring: native/ring.h's protocol with deadlines, deaths and growth.

Contract: one writer, N readers, K slots. Every reader gets version 0, 1, 2, ... each exactly once, in order, or an
exception that says why not. A slot is written again only when every reader has released it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping

import numpy as np

from headrace import _native
from headrace.errors import BatchTooLarge, ConfigError, FeedClosed, PeerGone
from headrace.shm import forked, segment
from headrace.shm.failure import MAX_FAILURE_BYTES
from headrace.shm.layout import SLOT_ALIGNMENT, slot_bytes_for
from headrace.shm.peers import WRITER, Watch, start_time
from headrace.shm.slots import WritableSlots, split
from headrace.shm.waiting import TICK_S, TICK_WITHOUT_PIDFDS_S, Patience, RingConfig
from headrace.spec import BatchSpec, align

DATA, END, ERROR, RESIZE = _native.DATA, _native.END, _native.ERROR, _native.RESIZE
MIN_SLOT_BYTES = align(_native.DESCRIPTOR_BYTES + MAX_FAILURE_BYTES, SLOT_ALIGNMENT)
_KNOB = "num_slots or the micro batch"


class EverybodyLeft(Exception):
    """All readers closed in good order: the writer's work is done. Not an error, and no user sees it."""


def is_debugging() -> bool:
    """HEADRACE_DEBUG=1: readers map read-only, released slots are poisoned: a stale or writing view shows."""
    return os.environ.get("HEADRACE_DEBUG", "") not in ("", "0")


class RingWriter:
    """Owns both segments' descriptors. The readers' pidfds belong to `watch`, which is the caller's.

    `check` is called about twice a second during a wait, and may raise.
    """

    def __init__(
        self,
        config: RingConfig,
        *,
        watch: Watch,
        num_readers: int,
        slot_bytes: int,
        max_slot_bytes: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        if not 1 <= num_readers <= _native.MAX_READERS:
            raise ConfigError(f"a ring has 1 to {_native.MAX_READERS} readers, got {num_readers}")
        if max_slot_bytes < MIN_SLOT_BYTES:
            raise ConfigError(f"max_slot_bytes must be at least {MIN_SLOT_BYTES:,}, got {max_slot_bytes:,}")
        self.config, self.max_slot_bytes = config, max_slot_bytes
        self.slot_bytes = align(max(slot_bytes, MIN_SLOT_BYTES), SLOT_ALIGNMENT)
        if self.slot_bytes > max_slot_bytes:
            raise BatchTooLarge(need=self.slot_bytes, have=max_slot_bytes)
        self._watch, self._check = watch, check
        self._tick_s = TICK_S if watch.is_complete else TICK_WITHOUT_PIDFDS_S
        self._debug = is_debugging()
        self.control_fd = self.data_fd = -1
        try:
            self.control_fd = segment.create(
                "headrace-control", _native.CONTROL_BYTES + num_readers * _native.LINE_BYTES, knob=_KNOB
            )
            self._native: _native.RingWriter | forked.Unusable = _native.RingWriter(
                segment.attach(self.control_fd, writable=True, knob=_KNOB),
                config.num_slots,
                num_readers,
                config.hold,
                secrets.randbits(64),
                os.getpid(),
                start_time(os.getpid()),
            )
            self._native.watch(watch.pidfds)
            self.data_fd = segment.create("headrace-data", config.num_slots * self.slot_bytes, knob=_KNOB)
            self._use_data(_mapped(self.data_fd), self.slot_bytes)
        except BaseException:
            self._close_descriptors()
            raise
        forked.register(self)

    def _use_data(self, mapping: _native.Mapping, slot_bytes: int) -> None:
        self._native.use_data(mapping, slot_bytes)
        self._slots = WritableSlots(split(segment.memory(mapping), self.config.num_slots, slot_bytes))
        self._poisoned = self._native.position

    # -- one batch: begin, fill the arrays, publish --------------------------------------------------------------------

    def begin(self, spec: BatchSpec) -> tuple[int, Mapping[str, np.ndarray]]:
        """The next version's slot and its arrays, at full capacity, to be filled in place.

        Blocks while the slot is still read. The arrays are the caller's until `publish`. PeerGone, FeedTimeout,
        BatchTooLarge (then `grow`), EverybodyLeft.
        """
        slot = self._wait_for_slot()
        return slot, self._slots.arrays(slot, spec)

    def publish(self, slot: int, *, counts: tuple[int, ...], lengths: tuple[int, ...], blob: bytes) -> int:
        """Make the slot of `begin` visible to every reader; returns its version.

        `blob` is extra metadata; BatchTooLarge if it does not fit.
        """
        layout_id, layout = self._slots.layout(slot)
        end = layout.blob_offset + len(blob)
        if end > self.slot_bytes:
            raise BatchTooLarge(need=end, have=self.slot_bytes, knob="slot_bytes")
        if blob:
            self._slots.write_blob(slot, layout.blob_offset, blob)
        num_fields, used_bytes = len(layout.places), layout.blob_offset
        return int(
            self._native.publish(DATA, layout_id, num_fields, used_bytes, used_bytes, len(blob), counts, lengths)
        )

    def finish(self, kind: int, blob: bytes = b"") -> None:
        """Publish END, or ERROR with its failure, as the last version. Blocks for a slot like `begin`."""
        self._publish_event(kind, blob)

    def _publish_event(self, kind: int, blob: bytes = b"") -> None:
        slot = self._wait_for_slot()
        self._slots.write_blob(slot, _native.DESCRIPTOR_BYTES, blob)
        offset = _native.DESCRIPTOR_BYTES
        self._native.publish(kind, 0, 0, offset, offset, len(blob), (), ())

    # -- growth --------------------------------------------------------------------------------------------------------

    def grow(self, spec: BatchSpec, *, blob_bytes: int, hand_out: Callable[[int, int], None]) -> None:
        """Move to a data segment whose slots hold `spec`; `hand_out(fd, slot_bytes)` gives it to the readers.

        RESIZE is the last version in the old segment: readers switch when they come to it, nobody waits for anybody.
        The old memory goes when the last reader has switched and let go of its views. BatchTooLarge, ConfigError.
        """
        need = slot_bytes_for(spec, blob_bytes=blob_bytes)
        if need > self.max_slot_bytes:
            raise BatchTooLarge(need=need, have=self.max_slot_bytes)
        # Half as much again where it may: lengths creep up, and each move costs a reservation.
        ceiling = self.max_slot_bytes // SLOT_ALIGNMENT * SLOT_ALIGNMENT
        slot_bytes = max(need, min(align(self.slot_bytes * 3 // 2, SLOT_ALIGNMENT), ceiling))
        larger_fd = segment.create("headrace-data", self.config.num_slots * slot_bytes, knob=_KNOB)
        try:
            # First of all: once RESIZE is published the readers look there, and a failure could not be told any more.
            mapping = _mapped(larger_fd)
            hand_out(larger_fd, slot_bytes)
            self._publish_event(RESIZE)
            self._use_data(mapping, slot_bytes)
        except BaseException:
            os.close(larger_fd)
            raise
        os.close(self.data_fd)
        self.data_fd, self.slot_bytes = larger_fd, slot_bytes

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _wait_for_slot(self) -> int:
        slot: int | None = self._native.begin(self._tick_s)
        if slot is None:
            patience = Patience(self.config, self._describe)
            while slot is None:
                self.check_readers()
                patience.check()
                slot = self._native.begin(self._tick_s)
        if self._debug:
            self._poison_released()
        return slot

    def check_readers(self) -> None:
        """PeerGone if a reader died, to whomever comes first, and told to all; EverybodyLeft if none is left."""
        self._check()
        if all(count == _native.LEFT for count in self._native.released):
            raise EverybodyLeft
        for key in self._watch.dead():
            if key != WRITER:
                self.miss(key)
        if self._native.state >= _native.READER_GONE:
            peer = self._watch.peer(self._native.state - _native.READER_GONE)
            raise PeerGone(peer.who, rank=peer.rank, pid=peer.pid, version=self._native.position)

    def miss(self, index: int) -> None:
        """Tell all that this reader's process has ended, unless it had left. Any thread may: it touches no wait."""
        native = self._native
        if native.released[index] != _native.LEFT:
            native.set_fate(_native.READER_GONE + index)

    def excuse(self, index: int) -> None:
        """Leave the ring for a reader that will never come to it. One that has come leaves by itself."""
        control = segment.attach(self.control_fd, writable=True, knob=_KNOB)
        with contextlib.suppress(ValueError):  # its line is taken
            _native.RingReader(control, index, os.getpid(), start_time(os.getpid())).leave()

    def _describe(self) -> str:
        needed = self._native.position - self.config.num_slots + 1
        late = [
            f"{self._watch.peer(i).describe()}, which has handed back {count}"
            for i, count in enumerate(self._native.released)
            if count < needed
        ]
        return f"a free slot for version {self._native.position}: still held by {'; '.join(late)}"

    def _poison_released(self) -> None:
        # An older version's slot has been written again: what lies there now is being read.
        oldest = max(self._poisoned, self._native.position - self.config.num_slots)
        self._poisoned = min(*self._native.released, self._native.position)
        for version in range(oldest, self._poisoned):
            self._slots.poison(version % self.config.num_slots)

    # -- facts and end -------------------------------------------------------------------------------------------------

    @property
    def published(self) -> int:
        """Versions published so far."""
        return self._native.position

    @property
    def wait_ns(self) -> int:
        """Time spent without a free slot: the readers are the bottleneck."""
        return self._native.wait_ns

    def close(self) -> None:
        """Let go of both segments. Idempotent. Readers drain what was published; without END PeerGone follows.

        A thread of this process that waits or writes in this end comes out with FeedClosed, or with what it meets.
        """
        if self.control_fd < 0:
            return
        native, self._native = self._native, forked.Unusable(lambda: FeedClosed("this end of the ring is closed"))
        native.set_fate(_native.WRITER_LEFT)
        native.close()
        self._slots = WritableSlots([])
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for fd in (self.control_fd, self.data_fd):
            if fd >= 0:
                os.close(fd)
        self.control_fd = self.data_fd = -1

    def disown(self, instead: forked.Unusable) -> None:
        """See forked.py. The child's copies of the descriptors go; the parent's ring goes on."""
        self._native = instead
        self._close_descriptors()


def _mapped(data_fd: int) -> _native.Mapping:
    return segment.attach(data_fd, writable=True, knob=_KNOB, populate=True)
