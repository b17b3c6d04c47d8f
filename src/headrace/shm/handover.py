"""How the ring's descriptors reach the readers: over a unix socket, after a nonce and a uid check.

    reader                              host (whoever writes)
      | -- hello: nonce, index, pidfd, state --> |     admit() collects one hello per reader
      | <-- welcome: settings, control fd, data fd, everybody's pidfds -- |     or a refusal that carries an error
      |                  ...                     |
      | <-- a larger data fd (RESIZE) ---------- |     the connection stays open for this
      | -- goodbye ----------------------------> |     whoever dies says none

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
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from headrace.errors import ConfigError, FeedTimeout, PeerGone
from headrace.shm import failure, forked, mail
from headrace.shm.peers import WRITER, Peer, open_pidfd, start_time

TICK_S = 0.1
_GOODBYE = b"goodbye"


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
    """A listening socket and the invitation to it. The socket may be passed on to the process that will host.

    ConfigError when this process may open no more files.
    """
    invitation = Invitation(address=f"headrace-{secrets.token_hex(16)}", nonce=secrets.token_hex(16))
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise mail.explained(error) from error
    listener.bind("\0" + invitation.address)
    listener.listen(128)
    return listener, invitation


# ---- host ------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True, eq=False, weakref_slot=True)
class Door:
    """The host's side of the hand-over. Owns the listener and its guests."""

    listener: socket.socket
    nonce: str
    guests: dict[int, Guest] = field(default_factory=dict)
    _strangers: list[socket.socket] = field(default_factory=list)
    """Connected, but have not said hello yet. Nobody waits for one of them alone: it may never speak."""

    def __post_init__(self) -> None:
        self.listener.setblocking(False)
        forked.register(self)

    def admit(self, expected: dict[int, Peer], *, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
        """Wait until every expected reader has said hello. Blocks.

        `expected` names the readers by index, with the pids their ranks announced, so that one that dies before it says
        hello is missed at once; `check` is called every tick and may raise. PeerGone, FeedTimeout, ConfigError.
        """
        deadline = time.monotonic() + timeout_s
        while missing := [peer for index, peer in expected.items() if index not in self.guests]:
            # poll, not select: a training process may well hold more than 1024 descriptors.
            poll = select.poll()
            for connection in (self.listener, *self._strangers):
                poll.register(connection, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(TICK_S * 1000)}
            for connection in [one for one in self._strangers if one.fileno() in ready]:
                self._strangers.remove(connection)
                self._meet(connection, expected)
            if self.listener.fileno() in ready:
                self._let_in()
            check()
            gone = [peer for peer in missing if peer.pid and not peer.is_alive()]
            gone += [guest.peer for guest in self.guests.values() if not guest.peer.is_alive()]
            if gone:
                raise PeerGone(gone[0].who, rank=gone[0].rank, pid=gone[0].pid, version=0)
            if time.monotonic() > deadline:
                raise FeedTimeout(
                    f"{', '.join(peer.who for peer in missing)} to ask for its first batch", timeout_s=timeout_s
                )
        self._dismiss_strangers()

    def _let_in(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            raise mail.explained(error) from error
        _, uid, _ = mail.credentials(connection)
        if uid == os.geteuid():
            self._strangers.append(connection)
        else:
            connection.close()  # not even an answer

    def _meet(self, connection: socket.socket, expected: dict[int, Peer]) -> None:
        fds: list[int] = []
        try:
            raw, fds = mail.receive(connection, 2)
            hello = msgspec.json.decode(raw, type=_Hello)
        except (OSError, msgspec.DecodeError):
            mail.drop(connection, fds)
            return
        if not hmac.compare_digest(hello.nonce.encode(), self.nonce.encode()) or len(fds) != 1 + hello.has_pidfd:
            mail.drop(connection, fds)
            return
        if hello.index not in expected or hello.index in self.guests:
            mail.send(
                connection, _refusal(ConfigError(f"reader {hello.index} is not expected here, or is here already"))
            )
            mail.drop(connection, fds)
            return
        state_fd, *pidfds = fds
        state = _read_all(state_fd)
        pidfd = pidfds[0] if pidfds else None
        pid, _, _ = mail.credentials(connection)  # 0 when the reader lives in a pid namespace that this one cannot see
        peer = Peer(who=f"rank {hello.rank}", rank=hello.rank, pid=pid or hello.pid, started=hello.started, pidfd=pidfd)
        self.guests[hello.index] = Guest(index=hello.index, connection=connection, peer=peer, state=state)

    def _dismiss_strangers(self) -> None:
        while self._strangers:
            self._strangers.pop().close()

    def welcome(self, *, control_fd: int, data_fd: int, slot_bytes: int, people: dict[int, Peer]) -> None:
        """Give every guest the ring. `people` are all its processes by reader index, and the writer."""
        told = {key: _person(peer) for key, peer in people.items()}
        pidfds = [peer.pidfd for peer in people.values() if peer.pidfd is not None]
        answer = msgspec.json.encode(_Answer(slot_bytes=slot_bytes, people=told))
        for guest in self.guests.values():
            mail.send(guest.connection, answer, (control_fd, data_fd, *pidfds))

    def hand_out_data(self, data_fd: int, slot_bytes: int) -> None:
        """Give every guest a larger data segment. Does not block: the message is small and read soon."""
        for guest in self.guests.values():
            mail.send(guest.connection, msgspec.json.encode(_Answer(slot_bytes=slot_bytes)), (data_fd,))

    def departed(self) -> list[int]:
        """The guests that have said goodbye. Some may never have come to the ring: nobody must wait for them there."""
        poll = select.poll()
        by_fd = {guest.connection.fileno(): guest for guest in self.guests.values()}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        heard = [by_fd[fd] for fd, _ in poll.poll(0)]
        return [guest.index for guest in heard if _has_word(guest.connection)]

    def refuse(self, error: BaseException) -> None:
        """Tell every guest, and everybody who still knocks, why there will be no ring."""
        for guest in self.guests.values():
            mail.send(guest.connection, _refusal(error))
        with contextlib.suppress(OSError):
            while True:
                self._let_in()
                if not self._strangers:
                    return
                self._turn_away(self._strangers.pop(), error)

    def _turn_away(self, stranger: socket.socket, error: BaseException) -> None:
        fds: list[int] = []
        stranger.settimeout(1.0)
        with contextlib.suppress(OSError, ConfigError):
            # Its hello must be read: to close a socket with words unread is to reset it, and the answer would be lost.
            _, fds = mail.receive(stranger, 2)
            mail.send(stranger, _refusal(error))
        mail.drop(stranger, fds)

    def close(self) -> None:
        """Idempotent. The guests find their connections at an end."""
        self.listener.close()
        self._dismiss_strangers()
        for guest in self.guests.values():
            guest.connection.close()

    def disown(self, instead: forked.Unusable) -> None:
        """See forked.py. A child that kept the connections open would hide its parent's death from the guests."""
        self.close()


def _person(peer: Peer) -> Person:
    return Person(who=peer.who, rank=peer.rank, pid=peer.pid, started=peer.started, has_pidfd=peer.pidfd is not None)


def _refusal(error: BaseException) -> bytes:
    return msgspec.json.encode(_Answer(refusal=failure.encode(error).decode()))


def _has_word(connection: socket.socket) -> bool:
    """After its hello a guest says one thing only, goodbye; an end without a word is its death."""
    try:
        return connection.recv(len(_GOODBYE), socket.MSG_PEEK | socket.MSG_DONTWAIT) == _GOODBYE
    except OSError:
        return False


def _read_all(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)
        return file.read()


# ---- reader ----------------------------------------------------------------------------------------------------------


def knock(invitation: Invitation, *, index: int, rank: int, state: bytes) -> socket.socket:
    """Say hello. Does not block: the listener exists before its invitation. The caller owns the connection.

    `state` is where this rank wants to begin, of any length: it travels as a memfd, since a message is bounded by a
    socket buffer. PeerGone if the host is gone already, ConfigError.
    """
    with contextlib.ExitStack() as passed, contextlib.ExitStack() as unless_good:
        try:
            connection = unless_good.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            state_fd = os.memfd_create("headrace-state", os.MFD_CLOEXEC)
            passed.callback(os.close, state_fd)
            with open(state_fd, "wb", closefd=False) as file:
                file.write(state)
            connection.connect("\0" + invitation.address)
        except ConnectionRefusedError as error:
            raise PeerGone("the process that writes the feed", rank=None, pid=0, version=0) from error
        except OSError as error:
            raise mail.explained(error) from error
        _, uid, _ = mail.credentials(connection)
        if uid != os.geteuid():
            raise ConfigError(f"the feed is hosted by uid {uid}, this process runs as uid {os.geteuid()}")
        fds, pidfd = [state_fd], open_pidfd(os.getpid())
        if pidfd is not None:
            passed.callback(os.close, pidfd)
            fds.append(pidfd)
        hello = _Hello(
            nonce=invitation.nonce,
            index=index,
            rank=rank,
            pid=os.getpid(),
            started=start_time(os.getpid()),
            has_pidfd=pidfd is not None,
        )
        try:
            socket.send_fds(connection, [msgspec.json.encode(hello)], fds)
        except OSError as error:
            raise PeerGone("the process that writes the feed", rank=None, pid=0, version=0) from error
        unless_good.pop_all()
        return connection


def hang_up(connection: socket.socket) -> None:
    """Say goodbye and close. Does not block, never raises; wakes a thread that waits in `enter`."""
    with contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(_GOODBYE)
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


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
        # Its children may keep the connection open after its death: ask for its life itself, then for a last word.
        if host.pid and not host.is_alive() and not poll.poll(0):
            raise PeerGone(host.who, rank=host.rank, pid=host.pid, version=0)
        if time.monotonic() > deadline:
            raise FeedTimeout(f"{waiting_for} from {host.describe() if host.pid else host.who}", timeout_s=timeout_s)
    try:
        raw, fds = mail.receive(connection, mail.MAX_DESCRIPTORS)
    except OSError:
        raw, fds = b"", []
    if not raw:
        raise PeerGone(host.who, rank=host.rank, pid=host.pid, version=0)
    answer = msgspec.json.decode(raw, type=_Answer)
    if answer.refusal:
        raise failure.decode(answer.refusal.encode())
    return answer, fds


__all__ = ["WRITER", "Admission", "Door", "Guest", "Invitation", "enter", "hang_up", "knock", "listen", "receive_data"]
