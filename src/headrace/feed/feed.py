"""The feed as a rank sees it: an iterator of batches that another process, or this one, prepares.

headrace.torch.Feed is this with tensors and process groups, and what most users want.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self

import msgspec
import numpy as np

from headrace import _native
from headrace.arguments import whole_number
from headrace.errors import ConfigError, FeedClosed, HeadraceError
from headrace.feed.agreement import telling_others
from headrace.feed.batch import Array, Batch, ends_of
from headrace.feed.config import FeedConfig
from headrace.feed.joining import Membership, join
from headrace.feed.production import Metadata
from headrace.feed.rendezvous import Alone, Rendezvous
from headrace.feed.request import FeedRequest
from headrace.feed.source import Source
from headrace.feed.stats import FeedStats
from headrace.packing import Cutter, View
from headrace.position import Position, from_state_dict, to_state_dict
from headrace.shm import failure
from headrace.shm.layout import read_blob
from headrace.shm.placement import describe
from headrace.shm.ring_reader import RingReader
from headrace.shm.ring_writer import DATA, END

_INTERRUPTED = "this feed was interrupted while it waited for its first batch, and left its group: make a new one"


class Feed(_native.Lender, Generic[Array]):
    """Batches for the ranks of one group, each prepared once per host.

    Give either `source` (PackedTokens, or a callable that returns an iterable of dicts): a feeder process reads it,
    started by the group's first rank on each host. Or `iterator` on the one rank of the group that has one, whose
    number within the group is `writer_rank`, and None on the others: what it yields is written by that rank itself.

    Every rank of the group makes the feed with the same arguments (`iterator` and `view` apart) and takes every batch;
    the feed ends on all of them at the same batch. Making it blocks until all ranks have (at most
    `config.start_timeout_s`); ConfigError, the same on every rank, if they disagree. `view` is the part of each batch
    that this rank takes; parts that are no slices are copied into memory of this process. `device_node` is the NUMA
    node of this rank's device: the feeder settles near it. `wrap` and `hand_out` are for
    subclasses: what becomes of a NumPy view, and of a batch's arrays, given the slot (uint8) they lie in.
    """

    def __init__(
        self,
        source: Source | None = None,
        *,
        iterator: Iterable[Mapping[str, Any]] | None = None,
        writer_rank: int | None = None,
        rendezvous: Rendezvous | None = None,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        data_rank: int = 0,
        data_size: int = 1,
        seed: int = 1234,
        config: FeedConfig | None = None,
        view: View | None = None,
        device_node: int | None = None,
        wrap: Callable[[Any], Array] = lambda array: array,
        hand_out: Callable[[dict[str, Array], np.ndarray], dict[str, Array]] | None = None,
    ) -> None:
        rendezvous = rendezvous or Alone()
        with telling_others(rank, rendezvous, timeout_s=FeedConfig().start_timeout_s):
            _check_types(config, view)
            data_rank, data_size = whole_number("data_rank", data_rank), whole_number("data_size", data_size)
        self.config = config or FeedConfig()
        self._hold = self.config.hold
        self._wrap, self._hand_out = wrap, hand_out or (_copies if self.config.owned else None)
        self._hands_out_owned = True
        """What `hand_out` returns is the caller's for ever."""
        self._cutter: Cutter[Array] | None = None
        self._cut_slot_bytes = 0
        if view is not None and not view.takes_everything:
            self._cutter = Cutter(view, num_buffers=self._hold, wrap=wrap)
            self._wrap = lambda array: array  # a view is cut from NumPy arrays, and wrapped afterwards
        self._ring: RingReader[Array] | None = None
        self._ended: HeadraceError | StopIteration | None = None
        self._beginning = Position(data_size=data_size)
        self._source_state: bytes | None = None
        self._state_follows = 0
        """After how many batches the source had that state."""
        self._owner_pid = os.getpid()
        self._own_work = threading.Lock()
        """Held while this process opens the feed or writes into it, which is for one thread at a time."""
        request = FeedRequest(
            source=source,
            iterator=iterator,
            writer_rank=writer_rank,
            ranks=tuple(ranks),
            rank=rank,
            data_rank=data_rank,
            data_size=data_size,
            seed=seed,
            config=self.config,
            parts=(view or View()).shared_terms,
            device_node=device_node,
        )
        self._member = _joined(request, rendezvous)
        self._digests = self._member.digests
        # A process that ends without close() has left, not died: the other ranks go on.
        self._finalizer = weakref.finalize(self, _close_if_ours, self._member.resources, self._owner_pid)

    # -- batches -------------------------------------------------------------------------------------------------------

    if TYPE_CHECKING:  # native/batch.c's, which asks `_next_slowly` for all that is not ready, plain and known

        def __next__(self) -> Batch[Array]:
            """The next batch. Blocks until it is there: then one C call, no copy, no device synchronisation.

            The batch before the last `config.hold` ones becomes invalid. StopIteration at the end of the data, on every
            rank at the same batch. SourceError, PeerGone, FeedTimeout, BatchTooLarge, FeedClosed; ConfigError and
            FormatError for what only the data show.
            """

    def _next_slowly(self) -> Batch[Array]:
        """A batch that is late, the first of its kind, a part, a copy; or the end."""
        if self._ended is not None:
            raise self._ended
        try:
            ring = self._ring or self._start()
            host = self._member.host
            if host is not None and not host.producer.finished:
                with self._one_thread():
                    host.producer.produce()
            delivery = ring.next()
            if delivery[2] != DATA:
                raise self._end(ring.blob(delivery), delivery[2])
            return self._batch(ring, delivery)
        except Exception:
            self._check_open()  # whatever breaks when another thread closes this feed meanwhile, that is why
            raise

    def _batch(self, ring: RingReader[Array], delivery: _native.Delivery) -> Batch[Array]:
        counts, index = delivery[4], self._num_delivered
        self._num_delivered = index + 1
        self._oldest_valid = index + 1 - self._hold
        self._consumed_samples = counts[0]
        if self._digests is not None:
            self._digests.delivered(index, counts[6])
        arrays, memory, metadata = ring.arrays(delivery), ring.slot(delivery), None
        if self._cutter is not None:
            arrays, counts = self._cut(self._cutter, ring, arrays, counts)
        if counts[5]:
            metadata = msgspec.msgpack.decode(read_blob(memory), type=Metadata)
            self._source_state, self._state_follows = metadata.source_state, index + 1
        if self._hand_out is None:
            return Batch(arrays, index, counts, self, memory, metadata)
        metadata = metadata or msgspec.msgpack.decode(read_blob(memory), type=Metadata)
        ends = ends_of(arrays)  # while they lie on the host
        copies = self._hand_out(arrays, memory)
        if self._hands_out_owned:
            ring.release()  # copied: the writer may have the slot a step earlier
        return Batch(copies, index, counts, None if self._hands_out_owned else self, None, metadata, ends)

    def _cut(
        self, cutter: Cutter[Array], ring: RingReader[Array], arrays: Mapping[str, Any], counts: tuple[int, ...]
    ) -> tuple[dict[str, Array], tuple[int, ...]]:
        """This rank's part, and the counts with the longest segment as it is laid out there."""
        if ring.slot_bytes != self._cut_slot_bytes:
            cutter.forget()
            self._cut_slot_bytes = ring.slot_bytes
        part, max_seqlen = cutter.cut(arrays, counts[1])
        return part, (counts[0], max_seqlen, *counts[2:])

    @property
    def _is_plain(self) -> bool:
        """Whether batches are handed out as they lie, and nobody but the ring need know of it."""
        return self._cutter is None and self._hand_out is None and self._digests is None and self._member.host is None

    @property
    def _is_ready(self) -> bool:
        """Whether the next batch can be taken without waiting, and without work of this process."""
        ring = self._ring
        return ring is not None and self._ended is None and self._member.host is None and ring.published > ring.version

    def _start(self) -> RingReader[Array]:
        if os.getpid() != self._owner_pid:
            raise ConfigError(
                f"this feed belongs to process {self._owner_pid}; a forked child cannot use it, make one there"
            )
        with self._one_thread():
            return self._ring or self._attach()

    def _attach(self) -> RingReader[Array]:
        try:
            self._ring = self._member.attach(self._beginning, self._wrap, self._check_open)
            self._check_open()
            if self._is_plain:
                self._ring.lend_to(self, Batch)
        except BaseException as error:
            if self._ended is None:
                self._ended = error if isinstance(error, HeadraceError) else FeedClosed(_INTERRUPTED)
                self.close()
            # Another thread may have closed this feed while this one was still opening something.
            self._member.resources.close()
            raise
        return self._ring

    @contextlib.contextmanager
    def _one_thread(self) -> Iterator[None]:
        """RuntimeError for a second thread, as the ring says it; the first one goes on."""
        if not self._own_work.acquire(blocking=False):
            raise RuntimeError("another thread of this process waits in this feed; one thread at a time takes batches")
        try:
            yield
        finally:
            self._own_work.release()

    def _check_open(self) -> None:
        if isinstance(self._ended, FeedClosed):
            raise self._ended from None

    def _end(self, blob: bytes, kind: int) -> HeadraceError | StopIteration:
        if kind == END:
            self._ended = StopIteration()
            return self._ended
        self._ended = failure.decode(blob)
        if self._member.host is not None:
            self._ended.__cause__ = self._member.host.producer.error
        return self._ended

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where this feed is: small, the same on every rank, of plain ints, strings and bytes.

        Counts what this rank has taken, not what is prefetched. The same after the last batch and after the end.
        """
        return to_state_dict(dataclasses.replace(self._position(), source=self._member.identity()))

    def _position(self) -> Position:
        if self._num_delivered == 0:
            return self._beginning
        return Position(
            consumed_samples=self._consumed_samples,
            consumed_batches=self._beginning.consumed_batches + self._num_delivered,
            data_size=self._member.topology.data_size,
            # A source need not have a state after every batch, and an older one would belong to another place.
            source_state=self._source_state if self._state_follows == self._num_delivered else None,
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin where `state` was taken. The same on every rank, before the first batch.

        FormatError for what is no state of a feed, ConfigError after the first batch; another corpus is refused, on
        every rank, with the first batch.
        """
        if self._ring is not None or self._ended is not None:
            raise ConfigError("load_state_dict comes before the first batch: this feed has already started")
        self._beginning = from_state_dict(state)

    # -- facts and end -------------------------------------------------------------------------------------------------

    def stats(self) -> FeedStats:
        """Who waited for whom, how long, how often. FeedClosed before the first batch and after close()."""
        ring = self._ring
        if ring is None or not self._finalizer.alive:
            raise FeedClosed("a feed has statistics between its first batch and close()")
        host, writer, place = self._member.host, self._member.writer, self._member.placement
        return FeedStats(
            rank=self._member.rank,
            writer=writer.who,
            writer_pid=writer.pid,
            delivered=self._num_delivered,
            ahead=0 if self._ended is not None else ring.published - ring.version,
            num_waits=ring.num_waits,
            wait_s=ring.wait_ns / 1e9,
            writer_wait_s=None if host is None else host.writer.wait_ns / 1e9,
            num_slots=self.config.num_slots,
            slot_bytes=ring.slot_bytes,
            placement=None if place is None else describe(place),
        )

    def close(self) -> None:
        """Leave the group's ring. Idempotent, does not block. Batches become invalid; tensors keep their memory."""
        if self._ended is None:
            self._ended = FeedClosed("this feed is closed")
        self._oldest_valid = sys.maxsize
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_types(config: object, view: object) -> None:
    if config is not None and not isinstance(config, FeedConfig):
        raise ConfigError(f"config must be a FeedConfig or None, got {config!r}")
    if view is not None and not isinstance(view, View):
        raise ConfigError(f"view must be a View or None, got {view!r}")


def _joined(request: FeedRequest, rendezvous: Rendezvous) -> Membership:
    with contextlib.ExitStack() as unless_joined:
        resources = contextlib.ExitStack()
        unless_joined.callback(resources.close)
        member = join(request, rendezvous, resources)
        unless_joined.pop_all()
    return member


def _copies(arrays: dict[str, Any], slot: np.ndarray) -> dict[str, Any]:
    return {name: array.copy() for name, array in arrays.items()}


def _close_if_ours(resources: contextlib.ExitStack, pid: int) -> None:
    # A forked child runs the parent's finalizers when it exits; the ring is not its to leave.
    if os.getpid() == pid:
        resources.close()
