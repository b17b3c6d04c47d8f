"""What one process may do with its end of a ring: fork, wait in threads, keep views, be interrupted, debug."""

from __future__ import annotations

import os
import signal
import time

import pytest

from .company import Company, Raised, raised_by, until_asleep


def test_a_forked_child_can_neither_use_nor_end_its_parents_ring(company: Company) -> None:
    host, readers = company.assemble(2)
    answer = readers[0].fork_and_read()
    assert answer.startswith(f"ConfigError: this feed belongs to process {readers[0].pid}; a forked child cannot")
    assert host.fork_and_close() == 0
    host.publish(count=2)
    assert [reader.next(2)["version"] for reader in readers] == [1, 1]


def test_a_forked_child_of_a_dead_writer_does_not_hide_its_death(company: Company) -> None:
    host, (reader,) = company.assemble(1)
    child = host.fork_and_keep()
    host.kill()
    with pytest.raises(Raised) as caught:
        reader.next()
    assert caught.value.kind == "PeerGone"
    os.kill(child, signal.SIGKILL)


def test_an_end_of_a_ring_has_one_reader(company: Company) -> None:
    _host, (reader,) = company.assemble(1)
    with pytest.raises(Raised, match=f"an impostor cannot attach: reader 0 is taken by process {reader.pid}") as caught:
        reader.claim_again()
    assert caught.value.kind == "ConfigError"


def test_other_python_threads_run_while_one_waits(company: Company) -> None:
    host, (reader,) = company.assemble(1)
    reader.run_beside()
    host.run_beside()
    reader.begin_call("next")
    until_asleep(reader)
    time.sleep(0.3)
    host.publish(count=4)
    reader.answer()
    ticks = reader.num_ticks()
    assert ticks > 50, "a wait that keeps the interpreter's lock lets nobody count"
    before = host.num_ticks()
    host.begin_call("publish", count=2)
    until_asleep(host)
    time.sleep(0.3)
    reader.next(3)
    host.answer()
    assert host.num_ticks() - before > 50


def test_close_ends_a_wait_of_another_thread(company: Company) -> None:
    _host, (reader,) = company.assemble(1)
    assert reader.next_while_closing() == "FeedClosed"
    assert reader.num_segments() == 0


def test_one_end_is_for_one_thread(company: Company) -> None:
    _host, (reader,) = company.assemble(1)
    assert reader.next_in_two_threads() == ["RuntimeError"]


def test_views_outlive_the_reader_and_hold_their_memory(company: Company) -> None:
    _host, (reader,) = company.assemble(1)
    _host.publish()
    reader.next()
    reader.close(keep_views=True)
    assert reader.held_values() == [0]
    assert reader.num_segments() == 1
    _host.kill()
    assert reader.held_values() == [0], "even after the writer's death"
    reader.close()
    assert reader.num_segments() == 0


def test_the_users_exception_inside_a_batch_stays_the_users(company: Company) -> None:
    host, (reader,) = company.assemble(1)
    host.publish()
    with pytest.raises(Raised, match="the user's own") as caught:
        reader.fail_inside_a_batch()
    assert caught.value.kind == "ZeroDivisionError"


def test_releasing_early_lets_the_writer_go_on(company: Company) -> None:
    host, (reader,) = company.assemble(1, num_slots=2)
    host.publish(count=2)
    reader.next()
    host.begin_call("publish")
    until_asleep(host)
    reader.release()
    assert host.answer() == 3


def test_debugging_shows_stale_views_and_forbids_writing() -> None:
    company = Company(environment={"HEADRACE_DEBUG": "1"})
    try:
        host, (reader, other) = company.assemble(2, num_slots=3)
        host.publish(count=3)
        reader.next()
        with pytest.raises(Raised, match="read-only"):
            reader.write_into_batch()
        host.begin_call("publish", count=20)  # a writer that waits often must poison only what nobody reads
        other.begin_call("next", 23)
        for version in range(1, 23):
            assert reader.next()["version"] == version
        assert other.answer()["version"] == 22
        assert host.answer() == 23
        reader.release(), other.release()
        host.publish()
        assert reader.held_values() == [-0x2424242424242425], "0xdb in every byte"
    finally:
        assert company.disband() == ""


@pytest.mark.parametrize("who", ["reader", "writer"])
def test_ctrl_c_ends_any_wait(company: Company, who: str, capsys: pytest.CaptureFixture[str]) -> None:
    host, (reader,) = company.assemble(1, num_slots=2)
    if who == "writer":
        host.publish(count=2)
        host.begin_call("publish")
        actor = host
    else:
        reader.begin_call("next")
        actor = reader
    until_asleep(actor)
    interrupted_at = time.monotonic()
    actor.signal(signal.SIGINT)
    assert raised_by(actor).kind == "KeyboardInterrupt"
    with capsys.disabled():
        print(f"\n  Ctrl-C ended a {who}'s wait after {1e3 * (time.monotonic() - interrupted_at):.0f} ms")
    if who == "writer":
        assert reader.next(2)["version"] == 1
    host.publish()
    assert reader.next()["version"] == (2 if who == "writer" else 0), "the ring goes on"


def test_a_waiting_rank_costs_nothing(company: Company, capsys: pytest.CaptureFixture[str]) -> None:
    host, (reader,) = company.assemble(1)
    before = reader.cpu_s()
    reader.begin_call("next")
    until_asleep(reader)
    time.sleep(2.0)
    host.publish()
    reader.answer()
    used_s = reader.cpu_s() - before
    with capsys.disabled():
        print(f"\n  a waiting rank used {100 * used_s / 2.0:.3f} % of a core over 2 s")
    assert reader.wait_stats()["num_waits"] <= 40, "ticks of 100 ms, not a poll loop"
