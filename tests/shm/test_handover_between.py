"""The hand-over between real processes: deaths at every step, other users and pid namespaces, few descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from headrace.shm import handover

from .company import Actor, Company, Died, Raised, until_asleep


@pytest.mark.parametrize("dies", ["before", "after"], ids=lambda when: f"{when}_the_host_asks_for_it")
def test_a_reader_that_dies_before_its_hello_is_missed_at_once(company: Company, dies: str) -> None:
    host, reader = company.add("host"), company.add("reader")
    host.listen()
    pid = reader.pid
    if dies == "before":
        reader.kill()
        reader.process.wait()
    host.begin_call("admit", 1, pids=[pid])
    if dies == "after":
        reader.kill()
    with pytest.raises(Raised, match="rank 0") as caught:
        host.answer()
    assert (caught.value.kind, caught.value.numbers["pid"]) == ("PeerGone", pid)


def test_a_reader_that_dies_between_hello_and_welcome_is_missed_at_once(company: Company) -> None:
    host, one, two = company.add("host"), company.add("reader"), company.add("reader")
    invitation = host.listen()
    host.begin_call("admit", 2)
    one.knock(invitation, 0)
    one.kill()
    with pytest.raises(Raised) as caught:
        host.answer()
    assert (caught.value.kind, caught.value.numbers["rank"]) == ("PeerGone", 0)
    with pytest.raises(Raised) as caught:
        two.knock(invitation, 1)
    assert caught.value.kind == "PeerGone"


def test_a_host_that_dies_before_its_welcome_is_missed_although_its_children_live(company: Company) -> None:
    host, reader = company.add("host"), company.add("reader")
    reader.knock(host.listen(), 0)
    host.admit(1)
    child = host.fork_and_keep()
    reader.begin_call("enter")
    host.kill()
    with pytest.raises(Raised) as caught:
        reader.answer()
    assert caught.value.kind == "PeerGone"
    os.kill(child, 9)


def test_the_host_closes_in_good_order_before_its_welcome(company: Company) -> None:
    host, reader = company.add("host"), company.add("reader")
    reader.knock(host.listen(), 0)
    host.admit(1)
    host.refuse("the corpus is empty")
    with pytest.raises(Raised, match="the corpus is empty") as caught:
        reader.enter()
    assert caught.value.kind == "SourceError"


def test_a_reader_that_attaches_when_the_host_has_long_finished_still_gets_everything(company: Company) -> None:
    host, prompt, late = company.add("host"), company.add("reader"), company.add("reader")
    invitation = host.listen()
    prompt.knock(invitation, 0)
    late.knock(invitation, 1)
    host.admit(2)
    host.open(num_slots=4)
    host.welcome()
    host.publish(count=2)
    host.end()
    host.close()
    with pytest.raises(Died):
        host.exit()
    for reader in (prompt, late):
        reader.enter()
        assert reader.next(2)["version"] == 1
        assert reader.next()["kind"] == 1


NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@as_root
def test_another_user_is_not_let_in(company: Company) -> None:
    host = company.add("host")
    invitation = host.listen()
    code = f"""
        import os, sys, socket
        os.setuid({NOBODY})
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect("\\0" + sys.argv[1])
        print("waiting", flush=True)
        print(stranger.recv(100))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), invitation["address"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        reader = company.add("reader")
        reader.knock(invitation, 0)
        host.admit(1)
        assert stranger.stdout.readline().strip() == "b''", "not even an answer"


@as_root
def test_a_reader_does_not_enter_another_users_ring() -> None:
    listener, invitation = handover.listen()
    code = f"""
        import sys, os
        from headrace.shm import handover
        os.setuid({NOBODY})
        try:
            handover.knock(handover.Invitation(address=sys.argv[1], nonce=sys.argv[2]), index=0, rank=0, state=b"")
        except Exception as error:
            print(type(error).__name__, error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), invitation.address, invitation.nonce]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    listener.close()
    assert done.stdout.startswith(f"ConfigError the feed is hosted by uid 0, this process runs as uid {NOBODY}")


@as_root
def test_many_readers_of_a_user_with_few_descriptors_all_get_theirs() -> None:
    """The kernel bounds descriptors under way per user: 24 welcomes of 27 each are more than 200."""
    code = f"""
        import os, resource, socket, threading
        from headrace.shm import handover
        from headrace.shm.handover import Door
        from headrace.shm.peers import Peer
        os.setuid({NOBODY})
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 2000))
        listener, invitation = handover.listen()
        door = Door(listener=listener, nonce=invitation.nonce)
        expected = {{i: Peer(who=f"rank {{i}}", rank=i, pid=0, started=0, pidfd=None) for i in range(24)}}
        connections = [handover.knock(invitation, index=i, rank=i, state=b"") for i in expected]
        door.admit(expected, timeout_s=10)
        people = {{i: guest.peer for i, guest in door.guests.items()}}
        fd = os.memfd_create("headrace-test")
        welcome = threading.Thread(target=lambda: door.welcome(control_fd=fd, data_fd=fd, slot_bytes=1, people=people))
        welcome.start()
        while welcome.is_alive():
            welcome.join(0.2)
            if len(people) and welcome.is_alive():
                break
        print("held back" if welcome.is_alive() else "all under way")
        host = Peer(who="host", rank=None, pid=0, started=0, pidfd=None)
        count = 0
        for connection in connections:
            admission = handover.enter(connection, host, timeout_s=10)
            count += len(admission.peers)
            for one in (admission.control_fd, admission.data_fd, *(peer.pidfd for peer in admission.peers.values())):
                os.close(one)
        welcome.join()
        print(count)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split("\n")[:2] == ["held back", str(24 * 24)], done.stderr


def test_a_reader_that_may_open_too_few_files_says_so(company: Company) -> None:
    host, reader = company.add("host"), company.add("reader")
    reader.knock(host.listen(), 0)
    host.admit(1)
    host.open()
    reader.limit("RLIMIT_NOFILE", reader.num_descriptors())
    host.welcome()
    with pytest.raises(Raised, match="raise RLIMIT_NOFILE") as caught:
        reader.enter()
    assert caught.value.kind == "ConfigError"


def test_a_reader_with_no_descriptor_to_spare_says_so(company: Company) -> None:
    host, reader = company.add("host"), company.add("reader")
    invitation = host.listen()
    reader.limit("RLIMIT_NOFILE", reader.num_descriptors() - 1)
    with pytest.raises(Raised, match="raise RLIMIT_NOFILE"):
        reader.knock(invitation, 0)


def test_two_jobs_with_equal_pids_in_two_pid_namespaces_do_not_meet() -> None:
    probe = subprocess.run(["unshare", "--pid", "--fork", "--map-root-user", "true"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("no pid namespaces here")
    prefix = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--map-root-user")
    script = textwrap.dedent("""
        import sys
        sys.path.insert(0, sys.argv[1])
        from shm.company import Company
        company = Company()
        host, (reader,) = company.assemble(1)
        print(host.pid, reader.pid, flush=True)
        for line in sys.stdin:
            host.publish(count=3)
            print(reader.next(3)["version"], flush=True)
        company.disband()
    """)
    command = [*prefix, sys.executable, "-c", script, str(Path(__file__).parents[1])]
    jobs = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        first, second = ([int(pid) for pid in job.stdout.readline().split()] for job in jobs)
        assert first == second, "the same pids in both"
        for round_number in range(3):
            for job in jobs:
                job.stdin.write("go\n")
                job.stdin.flush()
                assert int(job.stdout.readline()) == 3 * round_number + 2
        jobs[0].stdin.close()
        assert jobs[0].wait(30) == 0
        jobs[1].stdin.write("go\n")
        jobs[1].stdin.flush()
        assert int(jobs[1].stdout.readline()) == 11, "the other job's end is no business of this one"
    finally:
        for job in jobs:
            job.kill()
            job.wait()
            job.stdin.close()
            job.stdout.close()


def test_a_reader_in_another_pid_namespace_is_watched_all_the_same(company: Company) -> None:
    """Its pid means nothing here; its pidfd does. And the reader sees the host die although it cannot see its pid."""
    prefix = ("unshare", "--pid", "--fork", "--kill-child", "--map-root-user")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no pid namespaces here")
    host, near, far = company.add("host"), company.add("reader"), company.add("reader", prefix=prefix)
    invitation = host.listen()
    near.knock(invitation, 0)
    far.knock(invitation, 1)
    host.admit(2)
    host.open(num_slots=2)
    for reader in (near, far):
        reader.begin_call("enter")
    host.welcome()
    near.answer(), far.answer()
    host.publish(count=2)
    assert near.next(2)["version"] == far.next(2)["version"] == 1
    far.begin_call("next")
    near.begin_call("next")
    until_asleep(near)
    far.kill()
    with pytest.raises(Raised, match="rank 1") as caught:
        near.answer()
    assert caught.value.kind == "PeerGone"
    with pytest.raises(Died):
        far.answer()


def test_many_jobs_start_at_once() -> None:
    jobs = [Company() for _ in range(6)]
    try:
        actors: list[tuple[Actor, Actor]] = [(job.add("host"), job.add("reader")) for job in jobs]
        for host, _reader in actors:
            host.begin_call("listen")
        for host, reader in actors:
            reader.begin_call("knock", host.answer(), 0)
        for host, reader in actors:
            reader.answer()
            host.begin_call("admit", 1)
        for host, reader in actors:
            host.answer()
            host.open()
            reader.begin_call("enter")
            host.welcome()
            reader.answer()
        for number, (host, _reader) in enumerate(actors):
            host.publish(num_values=number + 1, count=3)
        for number, (_host, reader) in enumerate(actors):
            assert reader.next(3) == {"version": 2, "kind": 0, "num_values": number + 1}
    finally:
        assert [job.disband() for job in jobs] == [""] * len(jobs)
