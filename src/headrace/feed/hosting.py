"""The writer's side of a feed: collect the readers, agree on where to begin, make the ring, hand it out, fill it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.feed.config import FeedConfig
from headrace.feed.producer import Producer
from headrace.feed.production import Production
from headrace.feed.resume import decode
from headrace.position import Position
from headrace.shm.handover import Door
from headrace.shm.layout import slot_bytes_for
from headrace.shm.peers import WRITER, Peer, Watch, open_pidfd, start_time
from headrace.shm.ring_writer import MIN_SLOT_BYTES, RingWriter
from headrace.spec import BatchSpec

# Room for the numbers of the samples and a few extra keys; more makes the slots grow once.
METADATA_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnReader:
    """The reader that lives in the writer's process: it needs no hand-over."""

    index: int
    peer: Peer
    state: bytes


class Host:
    """A ring that is up, its producer, and the connections to its readers. Owns them all."""

    def __init__(
        self,
        door: Door,
        config: FeedConfig,
        production: Production,
        first: BatchSpec | None,
        *,
        people: dict[int, Peer],
    ) -> None:
        self._door, self._production = door, production
        self.local_segments: deque[tuple[int, int]] = deque()
        """Larger data segments for a reader in this process: (descriptor, slot_bytes)."""
        self._has_own_reader = len(people) > len(door.guests) + 1
        needed = MIN_SLOT_BYTES if first is None else slot_bytes_for(first, blob_bytes=METADATA_BYTES)
        self.watch = Watch(people)
        self.writer = RingWriter(
            config.ring,
            watch=self.watch,
            num_readers=len(people) - 1,
            slot_bytes=max(needed, config.slot_bytes or 0),
            max_slot_bytes=config.max_slot_bytes,
        )
        self.producer = Producer(production, first, self.writer, self._hand_out)
        door.welcome(
            control_fd=self.writer.control_fd,
            data_fd=self.writer.data_fd,
            slot_bytes=self.writer.slot_bytes,
            people=people,
        )

    def _hand_out(self, data_fd: int, slot_bytes: int) -> None:
        self._door.hand_out_data(data_fd, slot_bytes)
        if self._has_own_reader:
            self.local_segments.append((os.dup(data_fd), slot_bytes))

    def close(self) -> None:
        self._production.close()
        self.writer.close()
        self.watch.close()
        self._door.close()
        while self.local_segments:
            os.close(self.local_segments.pop()[0])


def bring_up(
    door: Door,
    config: FeedConfig,
    make_production: Callable[[Position], Production],
    *,
    expected: dict[int, Peer],
    me: Peer,
    own: OwnReader | None = None,
) -> Host:
    """Blocks until every expected reader is here and the first batch is known. A failure is told to every reader."""
    try:
        door.admit(expected, timeout_s=config.timeout_s)
        states = {guest.peer.who: guest.state for guest in door.guests.values()}
        people = {WRITER: me} | {guest.index: guest.peer for guest in door.guests.values()}
        if own is not None:
            people[own.index] = own.peer
            states[own.peer.who] = own.state
        production = make_production(decode(_agreed(states)))
        try:
            return Host(door, config, production, production.advance(), people=people)
        except BaseException:
            production.close()
            raise
    except BaseException as error:
        door.refuse(error)
        door.close()
        raise


def _agreed(states: dict[str, bytes]) -> bytes:
    (first, state), *others = states.items()
    for who, other in others:
        if other != state:
            raise ConfigError(f"the ranks of a feed must begin with one state, but those of {first} and {who} differ")
    return state


def this_process(who: str, rank: int | None) -> Peer:
    """This process as the others will watch it. Whoever gets it owns the pidfd."""
    pid = os.getpid()
    return Peer(who=who, rank=rank, pid=pid, started=start_time(pid), pidfd=open_pidfd(pid))
