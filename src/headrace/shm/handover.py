"""How the ring's descriptors reach the readers: over a unix socket, after a nonce and a uid check.

    reader                              host (whoever writes)
      | -- hello: nonce, index, pidfd, state --> |     admit() collects one hello per reader
      | <-- welcome: settings, control fd, data fd, everybody's pidfds -- |     or a refusal that carries an error
      |                  ...                     |
      | <-- a larger data fd (RESIZE) ---------- |     the connection stays open for this

The socket's name is random and abstract: nothing in the file system, nothing left after SIGKILL. Pidfds are handed on
because a pid means nothing in another pid namespace.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from headrace.errors import ConfigError, FeedTimeout, HeadraceError, PeerGone
from headrace.shm import failure
from headrace.shm.peers import WRITER, Peer, open_pidfd, start_time

TICK_S = 0.1
_MAX_MESSAGE = 256 * 1024
_MAX_DESCRIPTORS = 250
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True, kw_only=True, slots=True)
class Invitation:
    """Where to knock and what to say: travels to the group's other ranks through its store."""

    address: str
    nonce: str


class Person(msgspec.Struct, frozen=True, kw_only=True):
    """A process as others are told of it."""

    who: str
    rank: int | None
    pid: int
    started: int
    has_pidfd: bool


class _Hello(msgspec.Struct):
    nonce: str
    index: int
    rank: int
    pid: int
    started: int
    has_pidfd: bool


class _Answer(msgspec.Struct):
    slot_bytes: int = 0
    people: dict[int, Person] = msgspec.field(default_factory=dict)
    refusal: str = ""


@dataclass(kw_only=True, slots=True)
class Guest:
    """A reader that has said hello. Owns its connection and its pidfd."""

    index: int
    connection: socket.socket
    peer: Peer
    state: bytes


@dataclass(kw_only=True, slots=True)
class Admission:
    """What a reader gets: it owns the descriptors, the pidfds inside `peers` and the connection."""

    control_fd: int
    data_fd: int
    slot_bytes: int
    peers: dict[int, Peer]
    connection: socket.socket


def listen() -> tuple[socket.socket, Invitation]:
    """A listening socket and the invitation to it. The socket may be passed on to the process that will host."""
    invitation = Invitation(address=f"headrace-{secrets.token_hex(16)}", nonce=secrets.token_hex(16))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + invitation.address)
    listener.listen(128)
    return listener, invitation


# ---- host ------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Door:
    """The host's side of the hand-over."""

    listener: socket.socket
    nonce: str
    guests: dict[int, Guest] = field(default_factory=dict)

    def admit(self, expected: dict[int, Peer], *, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait until every expected reader has said hello. Blocks.

        `expected` names the readers by index, with the pids their ranks announced, so that one that dies before it says
        hello is missed at once; `check` is called every tick and may raise. PeerGone, FeedTimeout.
        """
        deadline = time.monotonic() + timeout_s
        self.listener.settimeout(TICK_S)
        while missing := [peer for index, peer in expected.items() if index not in self.guests]:
            with contextlib.suppress(TimeoutError):
                connection, _ = self.listener.accept()
                self._meet(connection, expected)
            check()
            gone = [peer for peer in missing if peer.pid and not peer.is_alive()]
            gone += [guest.peer for guest in self.guests.values() if not guest.peer.is_alive()]
            if gone:
                raise PeerGone(gone[0].who, rank=gone[0].rank, pid=gone[0].pid, version=0)
            if time.monotonic() > deadline:
                raise FeedTimeout(
                    f"{', '.join(peer.who for peer in missing)} to ask for its first batch", timeout_s=timeout_s
                )

    def _meet(self, connection: socket.socket, expected: dict[int, Peer]) -> None:
        pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        connection.settimeout(1.0)
        fds: list[int] = []
        try:
            raw, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, 2)
            hello = msgspec.json.decode(raw, type=_Hello)
        except (OSError, msgspec.DecodeError):
            _drop(connection, fds)
            return
        if uid != os.geteuid() or not hmac.compare_digest(hello.nonce, self.nonce):
            _drop(connection, fds)  # a stranger: not even an answer
            return
        if hello.index not in expected or hello.index in self.guests:
            _answer(connection, _refusal(ConfigError(f"reader {hello.index} is not expected here, or is here already")))
            _drop(connection, fds)
            return
        state_fd, *pidfds = fds
        state = _read_all(state_fd)
        pidfd = pidfds[0] if hello.has_pidfd else None
        peer = Peer(who=f"rank {hello.rank}", rank=hello.rank, pid=pid or hello.pid, started=hello.started, pidfd=pidfd)
        self.guests[hello.index] = Guest(index=hello.index, connection=connection, peer=peer, state=state)

    def welcome(self, *, control_fd: int, data_fd: int, slot_bytes: int, people: dict[int, Peer]) -> None:
        """Give every guest the ring. `people` are all its processes by reader index, and the writer."""
        told = {key: _person(peer) for key, peer in people.items()}
        pidfds = [peer.pidfd for peer in people.values() if peer.pidfd is not None]
        answer = msgspec.json.encode(_Answer(slot_bytes=slot_bytes, people=told))
        for guest in self.guests.values():
            _answer(guest.connection, answer, (control_fd, data_fd, *pidfds))

    def hand_out_data(self, data_fd: int, slot_bytes: int) -> None:
        """Give every guest a larger data segment. Does not block: the message is small and read soon."""
        for guest in self.guests.values():
            _answer(guest.connection, msgspec.json.encode(_Answer(slot_bytes=slot_bytes)), (data_fd,))

    def refuse(self, error: BaseException) -> None:
        """Tell every guest, and everybody who still knocks, why there will be no ring."""
        for guest in self.guests.values():
            _answer(guest.connection, _refusal(error))
        self.listener.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                _answer(connection, _refusal(error))
                connection.close()

    def close(self) -> None:
        self.listener.close()
        for guest in self.guests.values():
            guest.connection.close()


def _person(peer: Peer) -> Person:
    return Person(who=peer.who, rank=peer.rank, pid=peer.pid, started=peer.started, has_pidfd=peer.pidfd is not None)


def _refusal(error: BaseException) -> bytes:
    return msgspec.json.encode(_Answer(refusal=failure.encode(error).decode()))


def _answer(connection: socket.socket, message: bytes, fds: tuple[int, ...] = ()) -> None:
    # A guest that has died meanwhile is found by its pidfd, not here.
    with contextlib.suppress(OSError):
        socket.send_fds(connection, [message], fds)


def _read_all(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


def _drop(connection: socket.socket, fds: list[int]) -> None:
    connection.close()
    for fd in fds:
        os.close(fd)


# ---- reader ----------------------------------------------------------------------------------------------------------


def knock(invitation: Invitation, *, index: int, rank: int, state: bytes) -> socket.socket:
    """Say hello. Does not block: the listener exists before its invitation. PeerGone if it is gone already.

    `state` is where this rank wants to begin, of any length: it travels as a memfd, since a message is bounded by a
    socket buffer.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfd = open_pidfd(os.getpid())
    state_fd = os.memfd_create("headrace-state", os.MFD_CLOEXEC)
    passed = [state_fd] if pidfd is None else [state_fd, pidfd]
    hello = _Hello(
        nonce=invitation.nonce,
        index=index,
        rank=rank,
        pid=os.getpid(),
        started=start_time(os.getpid()),
        has_pidfd=pidfd is not None,
    )
    try:
        os.write(state_fd, state)
        connection.connect("\0" + invitation.address)
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.geteuid():
            raise ConfigError(f"the feed is hosted by uid {uid}, this process runs as uid {os.geteuid()}")
        socket.send_fds(connection, [msgspec.json.encode(hello)], passed)
    except OSError as error:
        connection.close()
        raise PeerGone("the process that writes the feed", rank=None, pid=0, version=0) from error
    except HeadraceError:
        connection.close()
        raise
    finally:
        for fd in passed:
            os.close(fd)
    return connection


def enter(
    connection: socket.socket, host: Peer, *, timeout_s: float, check: Callable[[], None] = lambda: None
) -> Admission:
    """Wait for the ring. Blocks. Raises what the host refused with, PeerGone if it died, FeedTimeout."""
    answer, fds = _receive(connection, host, timeout_s=timeout_s, waiting_for="the feed's first batch", check=check)
    control_fd, data_fd, *pidfds = fds
    remaining = iter(pidfds)
    peers = {
        key: Peer(
            who=person.who,
            rank=person.rank,
            pid=person.pid,
            started=person.started,
            pidfd=next(remaining) if person.has_pidfd else None,
        )
        for key, person in answer.people.items()
    }
    return Admission(
        control_fd=control_fd, data_fd=data_fd, slot_bytes=answer.slot_bytes, peers=peers, connection=connection
    )


def receive_data(connection: socket.socket, host: Peer, *, timeout_s: float) -> tuple[int, int]:
    """The larger data segment that a RESIZE announces: descriptor (the caller's) and slot_bytes."""
    answer, fds = _receive(connection, host, timeout_s=timeout_s, waiting_for="a larger data segment")
    return fds[0], answer.slot_bytes


def _receive(
    connection: socket.socket,
    host: Peer,
    *,
    timeout_s: float,
    waiting_for: str,
    check: Callable[[], None] = lambda: None,
) -> tuple[_Answer, list[int]]:
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(TICK_S * 1000):
        check()
        if time.monotonic() > deadline:
            raise FeedTimeout(f"{waiting_for} from {host.who}", timeout_s=timeout_s)
    try:
        raw, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, _MAX_DESCRIPTORS)
    except OSError:
        raw, fds = b"", []
    if not raw:
        raise PeerGone(host.who, rank=host.rank, pid=host.pid, version=0)
    answer = msgspec.json.decode(raw, type=_Answer)
    if answer.refusal:
        raise failure.decode(answer.refusal.encode())
    return answer, list(fds)


__all__ = ["WRITER", "Admission", "Door", "Guest", "Invitation", "enter", "knock", "listen", "receive_data"]
