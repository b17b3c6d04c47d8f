"""The long forms: `make soak`, SOAK_S seconds in all (default 1800), one verdict line at the end."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from .company import Company, Raised

pytestmark = pytest.mark.soak

SOAK_S = float(os.environ.get("SOAK_S", "1800"))
SHARE_S = SOAK_S / 10


@pytest.fixture
def watchdog() -> None:
    """These may take their share and more; a hang still ends, in the company's own patience."""


def say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n  soak: {text}")


def within_share(count: int) -> Iterator[int]:
    """0, 1, ... below `count`, as long as this test's share of the time lasts; at least three."""
    until = time.monotonic() + SHARE_S
    for number in range(count):
        if number >= 3 and time.monotonic() > until:
            return
        yield number


def test_killed_and_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    rng, rounds = random.Random(1), 0
    for number in within_share(200):
        company = Company()
        host, readers = company.assemble(2, num_slots=3)
        host.begin_call("publish", count=100_000)
        for reader in readers:
            reader.begin_call("next", 100_000)
        time.sleep(rng.uniform(0.0, 0.1))
        assert company.disband() == ""
        rounds = number + 1
    say(capsys, f"{rounds} jobs killed at random moments and started again")


def test_one_of_them_dies_in_full_swing(capsys: pytest.CaptureFixture[str]) -> None:
    rng, rounds, worst_s = random.Random(2), 0, 0.0
    for number in within_share(300):
        company = Company()
        host, readers = company.assemble(3, num_slots=4, hold=1 + number % 3)
        host.begin_call("publish", count=10_000_000)
        for reader in readers:
            reader.begin_call("next", 10_000_000)
        time.sleep(rng.uniform(0.0, 0.2))
        actors = [host, *readers]
        doomed = rng.choice(actors)
        killed_at = doomed.kill()
        stopped = []
        for actor in actors:
            if actor is not doomed:
                with pytest.raises(Raised) as caught:
                    actor.answer()
                assert caught.value.kind == "PeerGone"
                assert caught.value.numbers["pid"] == doomed.pid
                stopped.append(caught.value.numbers["version"])
        worst_s = max(worst_s, time.monotonic() - killed_at)
        if doomed is host:
            assert len(set(stopped)) == 1, "a dead writer is drained: all readers stop at one version"
        assert company.disband() == ""
        rounds = number + 1
    say(capsys, f"{rounds} deaths in full swing; all survivors knew after {1e3 * worst_s:.0f} ms at worst")


def test_stopped_for_long(company: Company, capsys: pytest.CaptureFixture[str]) -> None:
    host, readers = company.assemble(2, num_slots=3, stall_warning_s=1.0)
    stop_s = min(30.0, SHARE_S / 3)
    position = 0
    for actor in (host, readers[0]):
        host.begin_call("publish", count=200)
        for reader in readers:
            reader.begin_call("next", 200)
        actor.signal(signal.SIGSTOP)
        time.sleep(stop_s)
        actor.signal(signal.SIGCONT)
        position += 200
        assert host.answer() == position
        assert [reader.answer()["version"] for reader in readers] == [position - 1] * 2
    say(capsys, f"writer and reader stopped for {stop_s:.0f} s each: nobody was declared dead")


def test_many_batches_on_few_descriptors(company: Company, capsys: pytest.CaptureFixture[str]) -> None:
    host, readers = company.assemble(2, num_slots=4)
    before = [actor.num_descriptors() for actor in company.actors]
    for actor in company.actors:
        actor.limit("RLIMIT_NOFILE", 64)
    batches = 0
    for number in within_share(100):
        host.begin_call("publish", count=1_000)
        for reader in readers:
            reader.begin_call("next", 1_000)
        host.answer(), readers[0].answer(), readers[1].answer()
        if number % 10 == 9:
            host.begin_call("grow", 5_000 + 300 * number)
            for reader in readers:
                reader.begin_call("next")
            host.answer()
            host.publish()
            readers[0].answer(), readers[1].answer()
        batches += 1_000
    assert [actor.num_descriptors() for actor in company.actors] == before
    assert [reader.num_segments() for reader in readers] == [1, 1]
    say(capsys, f"{batches:,} batches and {batches // 10_000} moves to larger slots on 64 descriptors, none left over")


def test_idle_for_ten_seconds(company: Company, capsys: pytest.CaptureFixture[str]) -> None:
    host, readers = company.assemble(2)
    before = [reader.cpu_s() for reader in readers]
    for reader in readers:
        reader.begin_call("next")
    time.sleep(10.0)
    host.publish()
    for reader in readers:
        reader.answer()
    used = [(reader.cpu_s() - was) / 10.0 for reader, was in zip(readers, before, strict=True)]
    say(capsys, f"idle CPU per rank {', '.join(f'{100 * one:.3f} %' for one in used)} (target 0.1 %)")


def test_the_writers_cost_at_a_training_pace(company: Company, capsys: pytest.CaptureFixture[str]) -> None:
    host, readers = company.assemble(2, slot_bytes=1 << 17)
    before = host.cpu_s()
    started = time.monotonic()
    host.begin_call("publish", num_values=12_288, count=1_000, pace_s=0.005)  # 1 x 4096: tokens, labels, positions
    for reader in readers:
        reader.begin_call("next", 1_000)
    host.answer()
    share = (host.cpu_s() - before) / (time.monotonic() - started)
    for reader in readers:
        reader.answer()
    say(capsys, f"the writer took {share:.3f} of a core at 5 ms, 1 x 4096 (target 0.1, packing not included)")
