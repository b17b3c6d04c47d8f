"""Which collective is which: by name, by number where numbers hold, by order and alignment where nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.traces.clocks import estimate_offsets
from headrace.traces.groups import GroupedCollectives, group_collectives, parse_groups
from headrace.traces.pairing import pair
from headrace.traces.timeline import Group, RankTrace

from .jobs import MS, collective, synchronous_job

WORLD = Group(name="0", ranks=(0, 1))


def paired(lists, group=WORLD):
    return pair(GroupedCollectives(group=group, by_rank={rank: tuple(own) for rank, own in lists.items()}))


def starts(result):
    return [tuple(part.start_ns for _, part in instance.members) for instance in result.instances]


def run(kinds, *, offset=0, step=None, period=10 * MS, **facts):
    return [collective(offset + n * period, MS, kind=kind, step=step, **facts) for n, kind in enumerate(kinds)]


def test_names_pair_without_counting():
    left = [collective(0, MS, key="hcom_allReduce__1_0"), collective(5, MS, key="hcom_allReduce__1_1")]
    right = [collective(70, MS, key="hcom_allReduce__1_1"), collective(80, MS, key="hcom_allReduce__1_2")]
    result = paired({0: left, 1: right})
    assert (result.method, starts(result), result.unmatched) == ("name", [(5, 70)], ((0, 1), (1, 1)))


def test_sequence_numbers_pair_across_a_gap():
    left = [collective(n, MS, sequence=n) for n in (1, 2, 3, 4)]
    right = [collective(100 + n, MS, sequence=n) for n in (2, 4, 5)]
    result = paired({0: left, 1: right})
    assert (result.method, starts(result)) == ("sequence", [(2, 102), (4, 104)])
    assert result.unmatched == ((0, 2), (1, 1))


def test_doubled_sequence_numbers_pair_as_well():
    # pytorch PR#191990: the number of nccl2 advances by two; the calls of a coalesced group share one
    left = [collective(n, MS, sequence=2 * (n // 2)) for n in range(6)]
    right = [collective(100 + n, MS, sequence=2 * (n // 2)) for n in range(6)]
    assert starts(paired({0: left, 1: right})) == [(n, 100 + n) for n in range(6)]


@pytest.mark.parametrize("shift", [1, 3, 40])
def test_numbers_counted_per_process_are_seen_through(shift):
    # the same numbers mean other operations: kinds contradict each other, or nothing is shared at all
    kinds = ["all_reduce", "all_gather", "reduce_scatter"] * 4
    left = [collective(n * n * MS, MS, kind=kind, sequence=n) for n, kind in enumerate(kinds)]
    right = [collective(n * n * MS + 7, MS, kind=kind, sequence=n + shift) for n, kind in enumerate(kinds)]
    result = paired({0: left, 1: right})
    assert (result.method, result.unmatched) == ("order", ())
    assert starts(result) == [(n * n * MS, n * n * MS + 7) for n in range(12)]


def test_numbers_of_another_counter_with_the_same_pattern_show_by_their_ends():
    # period 1: kinds never contradict; but the ends of true pairs keep one distance, those of wrong pairs do not
    ends = [0, 10, 25, 31, 58, 60, 90, 95]
    left = [collective(at * MS, MS, step=0, sequence=n) for n, at in enumerate(ends)]
    right = [collective(at * MS, MS, step=0, sequence=n + 1) for n, at in enumerate(ends)]
    result = paired({0: left, 1: right})
    assert (result.method, len(result.instances)) == ("order", 8)


def test_order_inside_steps_survives_a_step_that_only_one_rank_recorded():
    left = [*run("abc", step=1), *run("abc", step=2, offset=100 * MS)]
    right = run("abc", step=2, offset=500 * MS)
    result = paired({0: left, 1: right})
    assert result.method == "order"
    assert starts(result) == [(100 * MS + n * 10 * MS, 500 * MS + n * 10 * MS) for n in range(3)]
    assert result.unmatched == ((0, 3),)


def test_lists_cut_at_the_edge_are_aligned_anew():
    kinds = ["a", "b", "b", "a", "c", "a", "b"]
    result = paired({0: run(kinds), 1: run(kinds[2:], offset=7)})
    assert len(result.instances) == 5
    assert all(instance.members[0][1].kind == instance.members[1][1].kind for instance in result.instances)
    assert starts(result)[0] == (20 * MS, 7)


def test_a_hole_in_the_middle_leaves_both_sides_paired():
    kinds = list("abcdefgh")
    result = paired({0: run(kinds), 1: run(kinds[:3] + kinds[5:])})
    assert [instance.kind for instance in result.instances] == ["a", "b", "c", "f", "g", "h"]


def test_equal_collectives_in_a_row_are_placed_by_their_ends():
    # step 1 is whole on both ranks and gives the offset of the clocks; in step 2 rank 1 lost the first of three
    at = [0, 10, 25]
    left = [collective(t * MS, MS, step=step) for step in (1, 2) for t in at]
    right = [collective(t * MS + 77, MS, step=1) for t in at] + [collective(t * MS + 77, MS, step=2) for t in at[1:]]
    assert starts(paired({0: left, 1: right}))[3:] == [(10 * MS, 10 * MS + 77), (25 * MS, 25 * MS + 77)]


@given(
    kinds=st.lists(st.sampled_from("abc"), min_size=4, max_size=30),
    head=st.integers(0, 2),
    tail=st.integers(0, 2),
    offset=st.integers(-(10**15), 10**15),
    gaps=st.permutations(range(1, 31)),
)
def test_whatever_the_edges_cut_away_what_is_paired_is_paired_right(kinds, head, tail, offset, gaps):
    """With unequal gaps: equal collectives at equal distances could be paired either way, by anybody."""
    at = [sum(gaps[:n]) * MS for n in range(len(kinds))]
    whole = [collective(t, MS, kind=kind, in_elements=n) for n, (t, kind) in enumerate(zip(at, kinds, strict=True))]
    # what only one rank knows must not help: sizes are hidden again, they only say what is right
    left = [replace(c, in_elements=None) for c in whole]
    cut = slice(head, len(whole) - tail)
    right = [replace(c, in_elements=None, start_ns=c.start_ns + offset) for c in whole[cut]]
    result = paired({0: left, 1: right})
    found = [(a - b) for a, b in starts(result)]
    assert set(found) <= {-offset}
    assert len(found) == len(right) or len(right) == 1  # one collective of a common kind could be any of them


def test_three_ranks_with_one_missing_a_collective_still_meet():
    group = Group(name="0", ranks=(0, 1, 2))
    lists = {rank: run("abcd", offset=rank) for rank in range(3)}
    lists[1] = lists[1][1:]
    result = paired(lists, group)
    assert [len(instance.members) for instance in result.instances] == [2, 3, 3, 3]
    assert [instance.is_complete for instance in result.instances] == [False, True, True, True]


def trace(rank, collectives, groups=()):
    return RankTrace(rank=rank, source="t", format="kineto", collectives=tuple(collectives), groups=tuple(groups))


def test_without_evidence_nothing_is_paired_and_the_reason_is_given():
    grouped, ungrouped = group_collectives([trace(0, run("ab")), trace(1, run("ab"))], [])
    assert grouped == ()
    assert [(own.rank, own.count) for own in ungrouped] == [(0, 2), (1, 2)]
    assert "--groups" in ungrouped[0].why


def test_one_declared_group_is_evidence_two_are_not():
    world, half = Group(name="0", ranks=(0, 1, 2, 3)), Group(name="1", ranks=(0, 1))
    one, _ = group_collectives([trace(0, run("ab"), [world]), trace(1, run("ab"), [world])], [])
    assert one[0].group.ranks == (0, 1, 2, 3)
    two, ungrouped = group_collectives([trace(0, run("ab"), [world, half]), trace(1, run("ab"), [world, half])], [])
    assert two == ()
    assert "declares 2 groups" in ungrouped[0].why


def test_groups_may_be_named_by_hand():
    traces = [trace(rank, run("ab", offset=rank)) for rank in range(4)]
    grouped, ungrouped = group_collectives(traces, parse_groups("0,1;2,3"))
    assert [one.group.ranks for one in grouped] == [(0, 1), (2, 3)]
    assert ungrouped == ()


@pytest.mark.parametrize("text", ["", "a", "0,1;1,2", "0,0", "-1,2", "0;;1"])
def test_impossible_groups_are_refused(text):
    with pytest.raises(ConfigError, match="--groups"):
        parse_groups(text)


def test_groups_of_different_sizes_live_in_one_trace():
    # TraceLens#60
    tensor, world = Group(name="1", ranks=(0, 1)), Group(name="0", ranks=(0, 1, 2, 3))
    traces = [
        trace(rank, [*run("ab", group=world), *(run("cd", group=tensor, offset=5) if rank < 2 else [])])
        for rank in range(4)
    ]
    grouped, _ = group_collectives(traces, [])
    assert {one.group.ranks: sorted(one.by_rank) for one in grouped} == {(0, 1, 2, 3): [0, 1, 2, 3], (0, 1): [0, 1]}


@given(st.lists(st.integers(-(10**15), 10**15), min_size=3, max_size=3))
def test_clock_offsets_come_back_from_the_ends(offsets):
    traces = synchronous_job(3, range(4), lambda rank, step: (10 + rank) * MS, offset_ns=lambda rank: offsets[rank])
    grouped, _ = group_collectives(traces, [])
    found = estimate_offsets(range(3), [instance for one in grouped for instance in pair(one).instances])
    assert [offset.offset_ns for offset in found] == [own - offsets[0] for own in offsets]
    assert all(offset.spread_ns == 0 for offset in found)


def test_clock_offsets_travel_along_chains_of_groups():
    pairs = [Group(name="a", ranks=(0, 1)), Group(name="b", ranks=(1, 2))]
    traces = [
        trace(0, run("ab", group=pairs[0])),
        trace(1, [*run("ab", group=pairs[0], offset=10), *run("cd", group=pairs[1], offset=10)]),
        trace(2, run("cd", group=pairs[1], offset=35)),
    ]
    grouped, _ = group_collectives(traces, [])
    found = estimate_offsets(range(3), [instance for one in grouped for instance in pair(one).instances])
    assert [offset.offset_ns for offset in found] == [0, 10, 35]
