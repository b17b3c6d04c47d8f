"""Waits and blame from durations: who came last, who only passed it on; the same under any clocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.traces.pairing import Instance
from headrace.traces.peers import lateness_by_peer, waits_by_peer
from headrace.traces.timeline import Group, PeerWait, RankTrace
from headrace.traces.waits import by_durations, shortest, waits_in

from .jobs import MS, collective

WORLD = Group(name="0", ranks=(0, 1, 2, 3))


def instance(durations_ms, *, group=WORLD, start=0, kind="all_reduce", step=1):
    """One collective that ends at one moment on all ranks; durations in ms by rank."""
    longest = max(durations_ms.values())
    members = tuple(
        (rank, collective(int(start + (longest - ms) * MS), int(ms * MS), kind=kind, step=step, group=group))
        for rank, ms in sorted(durations_ms.items())
    )
    return Instance(group=group, kind=kind, step=step, members=members)


def lateness_ms(instances, stage_of=None):
    found = by_durations(instances, stage_of or {}).lateness_ns
    return {key: ns / MS for key, ns in found.items()}


def test_the_wait_is_what_one_takes_longer_than_the_shortest():
    one = instance({0: 42, 1: 40, 2: 2, 3: 41})
    assert waits_in(one) == {0: 40 * MS, 1: 38 * MS, 2: 0, 3: 39 * MS}
    waits = by_durations([one], {})
    assert [(own.rank, own.wait_ns, own.waited_for) for own in waits.of_rank] == [
        (0, 40 * MS, {2: 40 * MS}),
        (1, 38 * MS, {2: 38 * MS}),
        (2, 0, {}),
        (3, 39 * MS, {2: 39 * MS}),
    ]
    assert waits.blame_ns == {(2, 1): 117 * MS}
    assert lateness_ms([one]) == {(2, 1): 39.0}


def test_nobody_came_last_when_two_are_as_short():
    assert shortest(instance({0: 10, 1: 10.001, 2: 30, 3: 30})) is None
    assert by_durations([instance({0: 5, 1: 5, 2: 5, 3: 5})], {}).blame_ns == {}


def test_two_late_ranks_share_what_the_others_waited():
    one = instance({0: 42, 1: 42, 2: 2, 3: 2.5})
    assert lateness_ms([one]) == {(2, 1): 40.0, (3, 1): 39.5}


def test_one_early_rank_makes_nobody_late():
    assert lateness_ms([instance({0: 42, 1: 2, 2: 2, 3: 2})]) == {}


def test_a_rank_held_up_just_before_is_a_victim():
    left, right = Group(name="a", ranks=(0, 1)), Group(name="b", ranks=(1, 2))
    held_up = instance({0: 2, 1: 42}, group=left)
    late_for_it = instance({1: 2, 2: 41}, group=right, start=60 * MS)
    assert lateness_ms([late_for_it, held_up]) == {(0, 1): 79.0}


def test_blame_passes_through_a_chain_and_each_keeps_its_own_part():
    groups = [Group(name=str(n), ranks=(n, n + 1)) for n in range(3)]
    chain = [
        instance({0: 1, 1: 31}, group=groups[0]),
        instance({1: 1, 2: 41}, group=groups[1], start=50 * MS),  # 10 ms of rank 1's own
        instance({2: 1, 3: 41}, group=groups[2], start=120 * MS),
    ]
    found = lateness_ms(chain)
    assert sum(found.values()) == 30 + 40 + 40
    assert found == {(0, 1): 30 + 30 + 30, (1, 1): 10 + 10}


def test_what_was_waited_before_the_group_last_met_is_no_excuse():
    left, right = Group(name="a", ranks=(0, 1)), Group(name="b", ranks=(1, 2))
    instances = [
        instance({0: 2, 1: 42}, group=left),
        instance({1: 2, 2: 2}, group=right, start=60 * MS),  # 1 and 2 are level again
        instance({1: 2, 2: 32}, group=right, start=90 * MS),
    ]
    assert lateness_ms(instances) == {(0, 1): 40.0, (1, 1): 30.0}


def test_a_broadcast_accuses_nobody_but_its_waits_are_shown():
    one = instance({0: 1, 1: 41, 2: 41, 3: 41}, kind="broadcast")
    waits = by_durations([one], {})
    assert waits.lateness_ns == {}
    assert waits.num_telling == 0
    assert [own.wait_ns for own in waits.of_rank] == [0, 40 * MS, 40 * MS, 40 * MS]


def test_a_group_that_was_not_traced_whole_accuses_nobody():
    one = instance({0: 2, 1: 42}, group=WORLD)
    assert by_durations([one], {}).num_telling == 0
    assert by_durations([one], {}).lateness_ns == {}


def test_stages_are_compared_with_themselves():
    # stage 1 (ranks 2, 3) arrives 30 ms later by design; in it, rank 3 is 10 ms later than rank 2
    one = instance({0: 42, 1: 42, 2: 12, 3: 2})
    assert lateness_ms([one], {0: 0, 1: 0, 2: 1, 3: 1}) == {(3, 1): 10.0}
    assert lateness_ms([one], {0: 0, 1: 0, 2: None, 3: None}) == {(3, 1): 40.0}


@given(
    durations=st.lists(st.lists(st.integers(1, 200), min_size=4, max_size=4), min_size=1, max_size=8),
    offsets=st.lists(st.integers(-(10**15), 10**15), min_size=4, max_size=4),
)
def test_clocks_do_not_matter(durations, offsets):
    def job(shift):
        made = []
        for number, row in enumerate(durations):
            plain = instance(dict(enumerate(row)), start=number * 1000 * MS)
            members = tuple(
                (rank, collective(part.start_ns + shift[rank], part.duration_ns, step=1, group=WORLD))
                for rank, part in plain.members
            )
            made.append(Instance(group=WORLD, kind="all_reduce", step=1, members=members))
        return by_durations(made, {})

    assert job([0, 0, 0, 0]) == job(offsets)


@given(st.lists(st.lists(st.integers(1, 200), min_size=4, max_size=4), min_size=1, max_size=8))
def test_waits_are_consistent(durations):
    instances = [instance(dict(enumerate(row)), start=n * 1000 * MS) for n, row in enumerate(durations)]
    waits = by_durations(instances, {})
    total = sum(own.wait_ns for own in waits.of_rank)
    assert total == sum((sum(row) - 4 * min(row)) * MS for row in durations)
    assert sum(waits.blame_ns.values()) <= total
    assert all(ns >= 0 for ns in waits.lateness_ns.values())
    for own in waits.of_rank:
        assert sum(own.waited_for.values()) <= own.wait_ns == sum(own.by_step.values())
        assert own.rank not in own.waited_for


def ascend(rank, waits):
    found = tuple(
        PeerWait(step=step, operation=operation, peer=peer, wait_ns=int(ms * MS)) for step, operation, peer, ms in waits
    )
    return RankTrace(rank=rank, source="t", format="ascend_db", peer_waits=found)


def test_waits_that_name_their_peer_convict_a_rank_that_was_not_traced():
    traces = [
        ascend(0, [(50, "op1", 5, 79), (50, "op1", 1, 6), (50, "op2", 7, 1)]),
        ascend(1, [(50, "op1", 5, 73), (50, "op2", 5, 1)]),
    ]
    assert lateness_by_peer(traces) == {(5, 50): round((75.5 + 74) / 2 * MS)}
    first, second = waits_by_peer(traces)
    assert (first.wait_ns, first.waited_for) == (80 * MS, {5: 79 * MS, 1: 6 * MS, 7: 1 * MS})  # planes side by side
    assert second.waited_for == {5: 74 * MS}


def test_a_traced_peer_that_waited_as_long_itself_passes_it_on():
    traces = [ascend(0, [(1, "op", 1, 50)]), ascend(1, [(1, "op", 5, 48)])]
    assert set(lateness_by_peer(traces)) == {(5, 1)}
    ring = [ascend(0, [(1, "op", 1, 50)]), ascend(1, [(1, "op", 0, 49)])]
    assert set(lateness_by_peer(ring)) == {(0, 1), (1, 1)}
