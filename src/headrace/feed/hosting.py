"""The writer's side of a feed: collect the readers, agree on where to begin, make the ring, hand it out, fill it."""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import ConfigError, HeadraceError, PeerGone
from headrace.feed.config import FeedConfig
from headrace.feed.producer import Producer
from headrace.feed.production import Production
from headrace.feed.resume import decode
from headrace.position import Position
from headrace.shm import failure
from headrace.shm.handover import Door
from headrace.shm.layout import slot_bytes_for
from headrace.shm.peers import WRITER, Peer, Watch, open_pidfd, start_time
from headrace.shm.ring_writer import MIN_SLOT_BYTES, EverybodyLeft, RingWriter
from headrace.shm.waiting import Patience, RingConfig
from headrace.spec import BatchSpec

# Room for the numbers of the samples and a few extra keys; more makes the slots grow once.
METADATA_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnReader:
    """The reader that lives in the writer's process: it needs no hand-over."""

    index: int
    state: bytes


class Host:
    """A ring that is up, its producer, and the connections to its readers. Owns them all, and the peers' pidfds."""

    def __init__(
        self,
        door: Door,
        config: FeedConfig,
        ring: RingConfig,
        production: Production,
        first: BatchSpec | None,
        *,
        people: dict[int, Peer],
    ) -> None:
        self._door, self._production = door, production
        self.local_segments: deque[tuple[int, int]] = deque()
        """Larger data segments for a reader in this process: (descriptor, slot_bytes)."""
        self._has_own_reader = len(people) > len(door.guests) + 1
        self._excused: set[int] = set()
        needed = MIN_SLOT_BYTES if first is None else slot_bytes_for(first, blob_bytes=METADATA_BYTES)
        self.watch = Watch(people)
        self.writer = RingWriter(
            ring,
            watch=self.watch,
            num_readers=len(people) - 1,
            slot_bytes=max(needed, config.slot_bytes or 0),
            max_slot_bytes=config.max_slot_bytes,
            check=self._excuse_the_departed,
        )
        self.producer = Producer(production, first, self.writer, self._hand_out)
        door.welcome(
            control_fd=self.writer.control_fd,
            data_fd=self.writer.data_fd,
            slot_bytes=self.writer.slot_bytes,
            people=people,
        )

    def _excuse_the_departed(self) -> None:
        """Whoever closed its feed before it came to the ring never releases anything: nobody must wait for it."""
        for index in self._door.departed():
            if index not in self._excused:
                self._excused.add(index)
                self.writer.excuse(index)

    def _hand_out(self, data_fd: int, slot_bytes: int) -> None:
        self._door.hand_out_data(data_fd, slot_bytes)
        if self._has_own_reader:
            self.local_segments.append((os.dup(data_fd), slot_bytes))

    def close(self) -> None:
        self.writer.close()
        self._production.close()
        self.watch.close()
        self._door.close()
        while self.local_segments:
            os.close(self.local_segments.pop()[0])


def bring_up(
    door: Door,
    config: FeedConfig,
    ring: RingConfig,
    make_production: Callable[[Position], Production],
    *,
    expected: dict[int, Peer],
    who: str,
    rank: int | None = None,
    own: OwnReader | None = None,
    check_open: Callable[[], None] = lambda: None,
) -> Host:
    """Blocks until every expected reader is here and the first batch is known. A failure is told to every reader.

    `who` and `rank` are this process as the others will know it; `check_open` is called with every tick and may raise.
    What the source raises comes out as SourceError; EverybodyLeft if nobody wants a batch any more.
    """
    with contextlib.ExitStack() as unless_up:
        people: dict[int, Peer] = {}
        unless_up.callback(_close, people, door)
        try:
            impatience = _Impatience(door, config, expected, check_open, has_own_reader=own is not None)
            door.admit(expected, timeout_s=math.inf, check=impatience.check)
            people |= {guest.index: guest.peer for guest in door.guests.values()}
            people[WRITER] = _this_process(who, rank)
            if own is not None:
                people[own.index] = _this_process(who, rank)
            production = make_production(decode(_agreed(door, who, own)))
            unless_up.callback(production.close)
            host = Host(door, config, ring, production, production.advance(), people=people)
        except (HeadraceError, EverybodyLeft) as error:
            door.refuse(error)
            raise
        except (Exception, SystemExit) as error:
            told = failure.decode(failure.encode(error))
            door.refuse(told)
            raise told from error
        except BaseException:  # Ctrl-C, or the end of the feeder
            door.refuse(PeerGone(who, rank=rank, pid=os.getpid(), version=0, reason="was interrupted"))
            raise
        unless_up.pop_all()
        return host


def _close(people: dict[int, Peer], door: Door) -> None:
    """What a Host would own by now."""
    peers = {id(peer): peer for peer in (*people.values(), *(guest.peer for guest in door.guests.values()))}
    for peer in peers.values():
        if peer.pidfd is not None:
            os.close(peer.pidfd)
    door.close()


class _Impatience:
    """How long the ranks that ask for the first batch wait for those that do not.

    Nobody waits before somebody asks: a feed for validation may be made hours before it is used.
    """

    def __init__(
        self,
        door: Door,
        config: FeedConfig,
        expected: dict[int, Peer],
        check_open: Callable[[], None],
        *,
        has_own_reader: bool,
    ) -> None:
        self._door, self._config, self._expected, self._check_open = door, config, expected, check_open
        self._has_own_reader = has_own_reader
        self._patience: Patience | None = None

    def check(self) -> None:
        """Once per tick. FeedTimeout, EverybodyLeft, FeedClosed."""
        self._check_open()
        departed = self._door.departed()
        if not self._has_own_reader and len(departed) == len(self._expected):
            raise EverybodyLeft
        if self._has_own_reader or len(self._door.guests) > len(departed):
            if self._patience is None:
                self._patience = Patience(self._config.ring, self._describe)
            self._patience.check()

    def _describe(self) -> str:
        missing = [peer for index, peer in self._expected.items() if index not in self._door.guests]
        return f"{', '.join(peer.describe() if peer.pid else peer.who for peer in missing)} to ask for its first batch"


def _agreed(door: Door, who: str, own: OwnReader | None) -> bytes:
    """The state that everybody wants to begin with. Whoever has left already has no say."""
    departed = door.departed()
    states = {guest.peer.who: guest.state for guest in door.guests.values() if guest.index not in departed}
    if own is not None:
        states[who] = own.state
    if not states:
        raise EverybodyLeft
    (first, state), *others = states.items()
    for other, its_state in others:
        if its_state != state:
            raise ConfigError(f"the ranks of a feed must begin with one state, but those of {first} and {other} differ")
    return state


def _this_process(who: str, rank: int | None) -> Peer:
    """This process as the others will watch it. Whoever gets it owns the pidfd."""
    pid = os.getpid()
    return Peer(who=who, rank=rank, pid=pid, started=start_time(pid), pidfd=open_pidfd(pid))
