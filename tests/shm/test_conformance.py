"""What every ring does, whoever implements it: the real one, and the twin that the state machine compares it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from headrace.shm.ring_writer import DATA, END, ERROR

from .rings import RealRing, Ring, TwinRing

Make = Callable[..., Ring]


@pytest.fixture(params=[RealRing, TwinRing], ids=["real", "twin"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Ring] = []

    def make_one(num_slots: int = 3, num_readers: int = 2, hold: int = 1) -> Ring:
        ring: Ring = request.param(num_slots, num_readers, hold)
        made.append(ring)
        for reader in range(num_readers):
            ring.attach(reader)
        return ring

    yield make_one
    while made:
        made.pop().close()


def test_a_reader_sees_nothing_until_it_is_published(make: Make) -> None:
    ring = make()
    assert ring.take(0) is None
    assert ring.publish(4)
    assert ring.take(0) == (0, DATA, 4)
    assert ring.take(0) is None


def test_every_reader_gets_every_version_once_and_in_order(make: Make) -> None:
    ring = make()
    for _ in range(3):
        assert ring.publish(4)
    assert [ring.take(0) for _ in range(3)] == [(0, DATA, 4), (1, DATA, 4), (2, DATA, 4)]
    assert [ring.take(1) for _ in range(3)] == [(0, DATA, 4), (1, DATA, 4), (2, DATA, 4)]


def test_the_writer_waits_for_the_slowest_reader(make: Make) -> None:
    ring = make(num_slots=2)
    assert ring.publish(1)
    assert ring.publish(1)
    assert not ring.publish(1)
    ring.take(0), ring.take(0), ring.take(0)
    assert not ring.publish(1), "reader 1 has taken nothing"
    ring.take(1)
    assert not ring.publish(1), "reader 1 still reads version 0"
    ring.take(1)
    assert ring.publish(1)


@pytest.mark.parametrize("hold", [1, 2, 3])
def test_the_last_hold_batches_stay_as_they_are(make: Make, hold: int) -> None:
    ring = make(num_slots=4, num_readers=1, hold=hold)
    for version in range(20):
        while ring.publish(8):
            pass
        ring.take(0)
        while ring.publish(8):
            pass
        assert ring.held(0) == [(v, {v}) for v in range(max(0, version - hold + 1), version + 1)]


def test_releasing_early_frees_slots_early(make: Make) -> None:
    ring = make(num_slots=2, num_readers=1)
    assert ring.publish(1)
    assert ring.publish(1)
    ring.take(0)
    assert not ring.publish(1)
    ring.release(0)
    assert ring.publish(1)
    assert ring.held(0) == []


def test_a_reader_that_left_holds_nobody_up(make: Make) -> None:
    ring = make(num_slots=2)
    ring.leave(1)
    for version in range(6):
        assert ring.publish(1)
        assert ring.take(0) == (version, DATA, 1)


def test_when_all_have_left_there_is_nothing_to_write_for(make: Make) -> None:
    ring = make()
    ring.leave(0)
    assert ring.publish(1)
    ring.leave(1)
    assert not ring.publish(1)


@pytest.mark.parametrize("kind", [END, ERROR])
def test_the_last_version_comes_after_all_others_and_comes_again(make: Make, kind: int) -> None:
    ring = make()
    ring.publish(1)
    assert ring.finish(kind)
    for reader in (0, 1):
        assert ring.take(reader) == (0, DATA, 1)
        assert ring.take(reader) == (1, kind, 0)
        assert ring.take(reader) == (1, kind, 0)


def test_a_batch_that_does_not_fit_moves_everybody_to_larger_slots(make: Make) -> None:
    ring = make(num_slots=4, num_readers=2, hold=2)
    ring.publish(10)
    assert ring.publish(6_000)
    assert ring.take(0) == (0, DATA, 10)
    assert ring.take(0) == (2, DATA, 6_000), "version 1 was the RESIZE"
    assert ring.held(0)[-1] == (2, {2})
    assert ring.take(1) == (0, DATA, 10)
    assert ring.held(1) == [(0, {0})], "a batch taken before the move stays valid"
    assert ring.take(1) == (2, DATA, 6_000)


def test_several_moves_in_a_row(make: Make) -> None:
    ring = make(num_slots=8, num_readers=2)
    for num_values in (10, 6_000, 12_000, 24_000):
        assert ring.publish(num_values)
    for reader in (0, 1):
        assert [ring.take(reader) for _ in range(5)] == [
            (0, DATA, 10),
            (2, DATA, 6_000),
            (4, DATA, 12_000),
            (6, DATA, 24_000),
            None,
        ]


def test_a_reader_may_attach_after_batches_and_moves(make: Make) -> None:
    ring = make(num_slots=4, num_readers=1)
    ring.publish(10)
    ring.publish(6_000)
    assert [ring.take(0), ring.take(0)] == [(0, DATA, 10), (2, DATA, 6_000)]
