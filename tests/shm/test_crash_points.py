"""SIGKILL at every point of the protocol (ring.h's hr_point), in a build made for it.

Whoever dies, and wherever: the others read everything that was published and nothing else, and then say who died.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from .company import Actor, Company, Died, Raised, until_asleep

# 1 before the descriptor, 2 before and 3 after the store of `published`, 4 the writer has announced what it waits for,
# 5 it was woken or timed out, 11 it has changed the fate and woken nobody yet.
WRITER_POINTS = (1, 2, 3, 4, 5, 11)
# 6 `released` is stored, 7 this reader is to wake the writer, 8 the event is counted but nobody woken, 9 a version is
# taken, 10 it has left but woken nobody, 11 as above.
READER_POINTS = (6, 7, 8, 9, 10, 11)


def a_company(build: Path, role: str, point: int) -> tuple[Actor, list[Actor], Company]:
    """One host and two readers with two slots, of which `role` (a reader: number 0) dies at `point`."""
    company = Company(environment={"HEADRACE_TEST_BUILD": str(build)})
    doomed = {"HEADRACE_TEST_BUILD": str(build), "HEADRACE_CRASHPOINT": str(point)}
    host = company.add("host", **({"environment": doomed} if role == "writer" else {}))
    readers = [
        company.add("reader", **({"environment": doomed} if role == "reader" and index == 0 else {}))
        for index in range(2)
    ]
    invitation = host.listen()
    for index, reader in enumerate(readers):
        reader.knock(invitation, index)
    host.admit(2)
    host.open(num_slots=2)
    for reader in readers:
        reader.begin_call("enter")
    host.welcome()
    for reader in readers:
        reader.answer()
    return host, readers, company


def outcome(actor: Actor) -> str:
    """How a call ended: "fine", "killed", or the error and whom it names."""
    try:
        actor.answer()
    except Died as death:
        return "killed" if death.status == -signal.SIGKILL else str(death)
    except Raised as error:
        return f"{error.kind} of rank {error.numbers.get('rank')}"
    return "fine"


@pytest.mark.parametrize("point", WRITER_POINTS)
def test_the_writer_dies_at(crashing_build: Path, point: int, capsys: pytest.CaptureFixture[str]) -> None:
    host, readers, company = a_company(crashing_build, "writer", point)
    try:
        if point == 11:
            host.begin_call("close")  # changes the fate
        else:
            host.begin_call("publish", count=6)
        assert outcome(host) == "killed", "at 4 and 5 since its two slots are full and nobody reads"
        died_at = time.monotonic()
        published = {1: 0, 2: 0, 3: 1, 4: 2, 5: 2, 11: 0}[point]
        for reader in readers:
            if published:
                assert reader.next(published)["version"] == published - 1
            reader.begin_call("next")
        assert [outcome(reader) for reader in readers] == ["PeerGone of rank None"] * 2
        with capsys.disabled():
            print(
                f"\n  writer dead at point {point}: both readers knew {1e3 * (time.monotonic() - died_at):.0f} ms later"
            )
    finally:
        assert company.disband() == ""


@pytest.mark.parametrize("point", READER_POINTS)
def test_a_reader_dies_at(crashing_build: Path, point: int, capsys: pytest.CaptureFixture[str]) -> None:
    host, (doomed, other), company = a_company(crashing_build, "reader", point)
    try:
        host.publish(count=2)
        if point == 11:
            other.kill()  # the doomed one finds that out, says so, and dies of it
            doomed.begin_call("next", 3)
        elif point in (7, 8):
            other.next(2)
            other.begin_call("next")  # it has handed back both: the doomed one is the last that the writer waits for
            host.begin_call("publish", count=2)
            until_asleep(host)
            doomed.begin_call("next", 2)
        else:
            doomed.begin_call("close" if point == 10 else "next", *([] if point == 10 else [2]))
        assert outcome(doomed) == "killed"
        died_at = time.monotonic()
        if point == 10:
            # It had left before it died: it is missed by nobody.
            host.begin_call("publish", count=2)
            assert other.next(4)["version"] == 3
            assert outcome(host) == "fine"
            return
        if point not in (7, 8):
            host.begin_call("publish", count=4)
        if point not in (7, 8, 11):
            other.begin_call("next", 6)
        missed = 1 if point == 11 else 0
        # Whichever finds out first; the other reader may have come to a version that the writer had yet published.
        assert outcome(host) == f"PeerGone of rank {missed}"
        if point != 11:
            assert outcome(other) in ("PeerGone of rank 0", "fine")
            other.begin_call("next", 9)
            assert outcome(other) == "PeerGone of rank 0"
        with capsys.disabled():
            print(f"\n  reader dead at point {point}: everybody knew {1e3 * (time.monotonic() - died_at):.0f} ms later")
    finally:
        assert company.disband() == ""


def test_versions_run_over_the_end_of_the_futex_word(crashing_build: Path) -> None:
    first = 2**32 - 5
    company = Company(environment={"HEADRACE_TEST_BUILD": str(crashing_build), "HEADRACE_FIRST_VERSION": str(first)})
    try:
        host, readers = company.assemble(2, num_slots=3)
        for reader in readers:
            reader.begin_call("next", 12)
        assert host.publish(count=12) == first + 12
        assert [reader.answer()["version"] for reader in readers] == [first + 11] * 2
    finally:
        assert company.disband() == ""
