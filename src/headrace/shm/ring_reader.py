"""The reading end of the ring. See ring_writer.py for the contract."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any, Generic

import numpy as np

from headrace import _native
from headrace.errors import ConfigError, FeedClosed, HeadraceError, PeerGone
from headrace.shm import segment
from headrace.shm.layout import read_blob
from headrace.shm.peers import WRITER, Watch
from headrace.shm.ring_writer import is_debugging
from headrace.shm.slots import Array, ReadableSlots, split
from headrace.shm.waiting import TICK_S, Patience, RingConfig

_KNOB = "num_slots or the micro batch"
RESIZE = _native.RESIZE


class _Unusable:
    """Stands where the native end was: every use raises. The ready path needs no check of its own that way."""

    def __init__(self, error: Callable[[], HeadraceError]) -> None:
        self._error = error

    def next(self, timeout_s: float) -> _native.Delivery | None:
        raise self._error()


class RingReader(Generic[Array]):
    """Owns its mappings. The peers' pidfds belong to `watch`, which is the caller's.

    `receive_data()` fetches the larger data segment that a RESIZE announces: its descriptor and slot_bytes.
    `wrap` turns a NumPy view into what is handed out.
    """

    def __init__(
        self,
        config: RingConfig,
        *,
        index: int,
        who: str,
        control_fd: int,
        data_fd: int,
        slot_bytes: int,
        watch: Watch,
        receive_data: Callable[[], tuple[int, int]],
        wrap: Callable[[np.ndarray], Array],
    ) -> None:
        self.config, self.index, self._who = config, index, who
        self._watch, self._receive_data, self._wrap = watch, receive_data, wrap
        self._closing = False
        self._ring = _native.RingReader(segment.attach(control_fd, writable=True, knob=_KNOB), index)
        self._native: _native.RingReader | _Unusable = self._ring
        self._use_data(data_fd, slot_bytes)
        _alive.add(self)

    def _use_data(self, data_fd: int, slot_bytes: int) -> None:
        mapping = segment.attach(data_fd, writable=not is_debugging(), knob=_KNOB, populate=True)
        self._ring.use_data(mapping, slot_bytes)
        self.slot_bytes = slot_bytes
        self._slots = ReadableSlots(split(segment.memory(mapping), self.config.num_slots, slot_bytes), self._wrap)

    # -- one batch -----------------------------------------------------------------------------------------------------

    def next(self) -> _native.Delivery:
        """Hand back all but the last hold - 1 versions and take the next one.

        A delivery is (version, slot, kind, layout_id, counts, lengths). Blocks until it is there; one C call if it is.
        PeerGone, FeedTimeout, FeedClosed.
        """
        delivery = self._native.next(TICK_S)
        if delivery is None:
            delivery = self._wait()
        while delivery[2] == RESIZE:
            self._switch()
            delivery = self._native.next(TICK_S) or self._wait()
        return delivery

    def absorb_resize(self) -> None:
        """Take the RESIZE that was just published by a writer in this very process, which would wait for us otherwise."""
        delivery = self._native.next(TICK_S)
        assert delivery is not None and delivery[2] == RESIZE, "the writer has published a RESIZE"
        self._switch()

    def _switch(self) -> None:
        data_fd, slot_bytes = self._receive_data()
        # Batches still held stay valid: their views keep the old mapping, and nobody writes there any more.
        self._use_data(data_fd, slot_bytes)
        os.close(data_fd)

    def arrays(self, delivery: _native.Delivery) -> dict[str, Array]:
        """The arrays of a DATA version, valid while it is one of the last `hold`. Shared: do not change the dict."""
        return self._slots.arrays(delivery[1], delivery[3], delivery[5])

    def blob(self, delivery: _native.Delivery) -> bytes:
        """A copy of the extra metadata of a version, under the same condition."""
        return read_blob(self._slots.memory[delivery[1]])

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _wait(self) -> _native.Delivery:
        patience = Patience(self.config, self._describe)
        while True:
            if self._closing:
                self._ring.close()
                raise FeedClosed("this feed was closed while it waited for a batch")
            self._check_peers()
            patience.check()
            delivery = self._ring.next(TICK_S)
            if delivery is not None:
                return delivery

    def _check_peers(self) -> None:
        """PeerGone for a dead reader at once; for a dead or departed writer only when all it published is read."""
        version, released = self._ring.position, self._ring.released
        dead = self._watch.dead()
        if WRITER not in dead:  # a writer that is a rank as well counts as writer: its batches are drained
            for key in dead:
                if released[key] != _native.LEFT:
                    self._ring.set_fate(_native.READER_GONE + key)
        state = self._ring.state
        if state >= _native.READER_GONE:
            peer = self._watch.peer(state - _native.READER_GONE)
            raise PeerGone(peer.who, rank=peer.rank, pid=peer.pid, version=version)
        if (WRITER in dead or state == _native.WRITER_LEFT) and self._ring.published <= version:
            writer = self._watch.peer(WRITER)
            reason = "died" if state == _native.RUNNING else "closed the feed before its end"
            raise PeerGone(writer.who, rank=writer.rank, pid=writer.pid, version=version, reason=reason)

    def _describe(self) -> str:
        writer = self._watch.peer(WRITER)
        return (
            f"version {self._ring.position} from {writer.who} (pid {writer.pid}), which has published "
            f"{self._ring.published}; {self._who} waits, readers have handed back {self._ring.released}"
        )

    # -- facts and end -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version that `next` takes next."""
        return self._ring.position

    @property
    def published(self) -> int:
        return self._ring.published

    @property
    def num_waits(self) -> int:
        """How often this rank found nothing to read."""
        return self._ring.num_waits

    @property
    def wait_ns(self) -> int:
        """Time this rank spent with nothing to read: the writer is the bottleneck."""
        return self._ring.wait_ns

    def close(self) -> None:
        """Leave the ring: it holds the writer up no more. Views that are still alive keep their memory. Idempotent."""
        if isinstance(self._native, _Unusable):
            return
        self._closing = True
        self._native = _Unusable(lambda: FeedClosed("this feed is closed"))
        with contextlib.suppress(ValueError):
            self._ring.leave()
        with contextlib.suppress(RuntimeError):  # a thread inside a wait closes when it comes out
            self._ring.close()

    def _disown(self) -> None:
        """In a forked child: this end belongs to the parent, which goes on reading."""
        parent = os.getppid()
        self._native = _Unusable(
            lambda: ConfigError(f"this feed belongs to process {parent}; a forked child cannot read it, make one there")
        )


_alive: weakref.WeakSet[RingReader[Any]] = weakref.WeakSet()


def _disown_all() -> None:
    for reader in list(_alive):
        reader._disown()


os.register_at_fork(after_in_child=_disown_all)
