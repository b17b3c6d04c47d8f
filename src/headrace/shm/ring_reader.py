"""The reading end of the ring. See ring_writer.py for the contract."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Generic

import numpy as np

from headrace import _native
from headrace.errors import ConfigError, FeedClosed, HeadraceError, PeerGone
from headrace.shm import forked, segment
from headrace.shm.layout import read_blob
from headrace.shm.peers import WRITER, Watch, start_time
from headrace.shm.ring_writer import is_debugging
from headrace.shm.slots import Array, ReadableSlots, split
from headrace.shm.waiting import TICK_S, TICK_WITHOUT_PIDFDS_S, Patience, RingConfig

_KNOB = "num_slots or the micro batch"
RESIZE = _native.RESIZE


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
        self._watch, self._receive_data = watch, receive_data
        self._closed = False
        pid, control = os.getpid(), segment.attach(control_fd, writable=True, knob=_KNOB)
        try:
            self._ring = _native.RingReader(control, index, pid, start_time(pid))
        except ValueError as error:  # not our layout, no such reader, or somebody is that reader
            raise ConfigError(f"{who} cannot attach: {error}") from error
        self._ring.watch(watch.pidfds)
        self._native: _native.RingReader | forked.Unusable = self._ring
        self._slots = ReadableSlots(wrap)
        self._use_data(data_fd, slot_bytes)
        forked.register(self)

    def _use_data(self, data_fd: int, slot_bytes: int) -> None:
        mapping = segment.attach(data_fd, writable=not is_debugging(), knob=_KNOB, populate=True)
        self._ring.use_data(mapping, slot_bytes)
        self.slot_bytes = slot_bytes
        self._slots.use(split(segment.memory(mapping), self.config.num_slots, slot_bytes))

    # -- one batch -----------------------------------------------------------------------------------------------------

    def lend_to(self, lender: _native.Lender, batch_type: type[_native.Batch]) -> None:
        """Let `lender` take by itself what is a batch of arrays that are known; the rest is for `next` and `arrays`."""
        tick_s = TICK_S if self._watch.is_complete else TICK_WITHOUT_PIDFDS_S
        lender._lend_from(self._ring, self._slots.known, batch_type, tick_s)

    def next(self) -> _native.Delivery:
        """Hand back all but the last hold - 1 versions and take the next one.

        A delivery is (version, slot, kind, layout_id, counts, lengths). Blocks until it is there; one C call if it is.
        END and ERROR come again with every further call. PeerGone, FeedTimeout, FeedClosed.
        """
        delivery = self._native.next(0.0) or self._wait()
        while delivery[2] == RESIZE:
            self._move()
            delivery = self._native.next(0.0) or self._wait()
        return delivery

    def absorb_resize(self) -> None:
        """Take the RESIZE just published by a writer in this very process, which would wait for us otherwise."""
        delivery = self._native.next(0.0)
        assert delivery is not None, "the writer has published"
        assert delivery[2] == RESIZE, "the writer has published a RESIZE"
        self._move()

    def _move(self) -> None:
        """Switch to the larger segment. Batches still held stay valid: their views keep the old memory, and nobody
        writes there any more."""
        try:
            data_fd, slot_bytes = self._receive_data()
            try:
                self._use_data(data_fd, slot_bytes)
            finally:
                os.close(data_fd)
        except BaseException as error:
            # RESIZE is behind us and the versions after it lie where we cannot look: this end reads nothing any more.
            reason = error if isinstance(error, HeadraceError) else FeedClosed("interrupted while the feed grew")
            self._native = forked.Unusable(lambda: reason)
            self._ring.disown()
            raise

    def arrays(self, delivery: _native.Delivery) -> dict[str, Array]:
        """The arrays of a DATA version, valid while it is one of the last `hold`. Shared: do not change the dict.

        Ask before the next `next`: afterwards a delivery may speak of a segment that is no longer this reader's.
        """
        return self._slots.arrays(delivery[1], delivery[3], delivery[5])

    def slot(self, delivery: _native.Delivery) -> np.ndarray:
        """The bytes of a version's slot (uint8), under the same condition; the array keeps the mapping alive."""
        return self._slots.memory(delivery[1])

    def blob(self, delivery: _native.Delivery) -> bytes:
        """A copy of the extra metadata of a version, under the same condition."""
        return read_blob(self.slot(delivery))

    def release(self) -> None:
        """Hand back everything taken so far: for whoever has copied it. The writer gets its slots a step earlier."""
        self._native.release(self._ring.position)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _wait(self) -> _native.Delivery:
        patience = Patience(self.config, self._describe, lambda: self._ring.wait_ns / 1e9, longest_tick_s=math.inf)
        delivery = None
        while delivery is None:
            self._check_peers()
            due_s = patience.check()
            delivery = self._native.next(due_s if self._watch.is_complete else TICK_WITHOUT_PIDFDS_S)
        return delivery

    def _check_peers(self) -> None:
        """PeerGone for a dead reader at once; for a dead or departed writer only when all it published is read."""
        native = self._native
        version, released = native.position, native.released
        dead = self._watch.dead()
        if WRITER not in dead:
            for key in dead:
                # A rank that writes as well counts as writer: what it has published is drained.
                if released[key] != _native.LEFT and not self._watch.is_writer(key):
                    native.set_fate(_native.READER_GONE + key)
        state = native.state
        if state >= _native.READER_GONE:
            peer = self._watch.peer(state - _native.READER_GONE)
            raise PeerGone(peer.who, rank=peer.rank, pid=peer.pid, version=version)
        if (WRITER in dead or state == _native.WRITER_LEFT) and native.published <= version:
            writer = self._watch.peer(WRITER)
            reason = "died" if state == _native.RUNNING else "closed the feed before its end"
            reason += self._ended_too()
            raise PeerGone(writer.who, rank=writer.rank, pid=writer.pid, version=version, reason=reason)

    def _ended_too(self) -> str:
        """The other ranks that are no more: whether one of them took the writer with it, a person may tell."""
        # Asked anew: whoever ended before the writer did is known by now.
        dead = [key for key in self._watch.dead() if key != WRITER and not self._watch.is_writer(key)]
        names = ", ".join(f"{peer.who} (pid {peer.pid})" for peer in map(self._watch.peer, dead))
        return f" ({names} ended too)" if names else ""

    def _describe(self) -> str:
        writer = self._watch.peer(WRITER)
        late = [
            f"{self._watch.peer(i).describe()} has handed back {count}"
            for i, count in enumerate(self._ring.released)
            if count != _native.LEFT and i != self.index
        ]
        return (
            f"version {self._ring.position} from {writer.describe()}, which has published {self._ring.published}; "
            f"{self._who} (pid {os.getpid()}) waits" + "".join(f", {reader}" for reader in late)
        )

    # -- facts and end -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version that `next` takes next."""
        return self._ring.position

    @property
    def published(self) -> int:
        """Versions published so far: `published - version` of them are ready."""
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
        """Leave the ring: it holds the writer up no more. Idempotent.

        Views that are still alive keep their memory, but from now on the writer may reuse it.
        """
        if self._closed:
            return
        self._closed = True
        self._native = forked.Unusable(lambda: FeedClosed("this feed is closed"))
        self._ring.leave()
        self._ring.close()
        self._slots.use([])

    def disown(self, instead: forked.Unusable) -> None:
        """See forked.py."""
        self._closed, self._native = True, instead
        self._ring.disown()
