"""Who gets the ring's descriptors, and who does not."""

from __future__ import annotations

import json
import os
import socket

import pytest

from headrace.errors import ConfigError, FeedTimeout, HeadraceError, PeerGone
from headrace.shm import handover
from headrace.shm.handover import Door
from headrace.shm.peers import Peer, open_pidfd, start_time

EXPECTED = {0: Peer(who="rank 0", rank=0, pid=0, started=0, pidfd=None)}


def unknown_host() -> Peer:
    return Peer(who="the feeder", rank=None, pid=0, started=0, pidfd=None)


@pytest.fixture
def door():
    listener, invitation = handover.listen()
    door = Door(listener=listener, nonce=invitation.nonce)
    yield door, invitation
    for guest in door.guests.values():
        if guest.peer.pidfd is not None:
            os.close(guest.peer.pidfd)
    door.close()


def test_a_guest_brings_its_state_whatever_its_length(door) -> None:
    door, invitation = door
    state = os.urandom(3_000_000)
    connection = handover.knock(invitation, index=0, rank=5, state=state)
    door.admit(EXPECTED, timeout_s=10)
    assert door.guests[0].state == state
    assert (door.guests[0].peer.who, door.guests[0].peer.pid) == ("rank 5", os.getpid())
    connection.close()


def test_received_descriptors_are_not_passed_on_to_other_programs(door) -> None:
    door, invitation = door
    connection = handover.knock(invitation, index=0, rank=0, state=b"")
    door.admit(EXPECTED, timeout_s=10)
    fd = os.memfd_create("headrace-test")
    door.welcome(control_fd=fd, data_fd=fd, slot_bytes=4096, people={0: door.guests[0].peer})
    admission = handover.enter(connection, unknown_host(), timeout_s=10)
    received = [admission.control_fd, admission.data_fd, admission.peers[0].pidfd]
    assert not any(os.get_inheritable(one) for one in [*received, door.guests[0].peer.pidfd])
    for one in [fd, *received]:
        os.close(one)
    connection.close()


def test_a_wrong_nonce_gets_no_answer_and_disturbs_nobody(door) -> None:
    door, invitation = door
    impostor = handover.knock(
        handover.Invitation(address=invitation.address, nonce="0" * 32), index=0, rank=0, state=b""
    )
    rightful = handover.knock(invitation, index=0, rank=0, state=b"rightful")
    door.admit(EXPECTED, timeout_s=10)
    assert door.guests[0].state == b"rightful"
    assert impostor.recv(100) == b""
    impostor.close()
    rightful.close()


def test_a_silent_or_babbling_stranger_keeps_nobody_waiting(door) -> None:
    door, invitation = door
    strangers = []
    for words in (b"", b"GET / HTTP/1.1", b"{}", json.dumps({"nonce": invitation.nonce}).encode()):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect("\0" + invitation.address)
        if words:
            stranger.send(words)
        strangers.append(stranger)
    connection = handover.knock(invitation, index=0, rank=0, state=b"")
    door.admit(EXPECTED, timeout_s=10)
    assert all(stranger.recv(100) == b"" for stranger in strangers)
    for one in [connection, *strangers]:
        one.close()


def test_a_hello_without_its_descriptors_is_dropped(door) -> None:
    door, invitation = door
    hello = {"nonce": invitation.nonce, "index": 0, "rank": 0, "pid": 1, "started": 1, "has_pidfd": True}
    liar = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    liar.connect("\0" + invitation.address)
    liar.send(json.dumps(hello).encode())
    with pytest.raises(FeedTimeout, match="rank 0 to ask for its first batch"):
        door.admit(EXPECTED, timeout_s=0.3)
    assert liar.recv(100) == b""
    liar.close()


def test_a_second_claimant_is_refused_and_told_why(door) -> None:
    door, invitation = door
    first = handover.knock(invitation, index=0, rank=0, state=b"")
    second = handover.knock(invitation, index=0, rank=0, state=b"")
    others = EXPECTED | {1: Peer(who="rank 1", rank=1, pid=0, started=0, pidfd=None)}
    with pytest.raises(FeedTimeout, match="rank 1"):
        door.admit(others, timeout_s=0.5)
    with pytest.raises(ConfigError, match="reader 0 is not expected here, or is here already"):
        handover.enter(second, unknown_host(), timeout_s=10)
    first.close()
    second.close()


def test_a_refusal_reaches_those_inside_and_those_who_still_knock(door) -> None:
    door, invitation = door
    inside = handover.knock(invitation, index=0, rank=0, state=b"")
    door.admit(EXPECTED, timeout_s=10)
    outside = handover.knock(invitation, index=1, rank=1, state=b"")
    door.refuse(ValueError("no corpus"))
    for connection in (inside, outside):
        with pytest.raises(HeadraceError, match="no corpus"):
            handover.enter(connection, unknown_host(), timeout_s=10)
        connection.close()


def test_a_late_generation_finds_nobody() -> None:
    listener, invitation = handover.listen()
    listener.close()
    with pytest.raises(PeerGone, match="the process that writes the feed"):
        handover.knock(invitation, index=0, rank=0, state=b"")


def test_two_doors_have_two_names() -> None:
    (one, first), (two, second) = handover.listen(), handover.listen()
    assert first.address != second.address
    assert first.nonce != second.nonce
    one.close()
    two.close()


def test_a_host_that_never_answers_is_a_timeout(door) -> None:
    _door, invitation = door
    connection = handover.knock(invitation, index=0, rank=0, state=b"")
    me = Peer(who="rank 9", rank=9, pid=os.getpid(), started=start_time(os.getpid()), pidfd=None)
    with pytest.raises(FeedTimeout, match=r"the feed's first batch from rank 9 \(pid"):
        handover.enter(connection, me, timeout_s=0.2)
    connection.close()


def test_pidfd_of_this_process_is_open_while_it_lives() -> None:
    pidfd = open_pidfd(os.getpid())
    assert pidfd is not None
    os.close(pidfd)
    assert open_pidfd(2**22 + 1) is None
