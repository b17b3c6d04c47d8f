"""Links are judged within their kind, by the median, and only if they carried something."""

from __future__ import annotations

from headrace.traces import judge
from headrace.traces.slow_link import judge_slow_link
from headrace.traces.timeline import LinkLoad, PacketSizes, RankTrace

MB = 1e6


def load(src, dst, gb_s, *, transport="HCCS", mb=60.0):
    return LinkLoad(step=1, src=src, dst=dst, transport=transport, num_bytes=mb * MB, time_ns=mb * MB / gb_s)


def traced(*loads, rank=0, packet_mb=None, chip=None):
    packets = ()
    if packet_mb is not None:
        packets = (PacketSizes(transport="HCCS", num_bytes=1e9, mean_bytes=packet_mb * MB, large_share=0.0),)
    return RankTrace(rank=rank, source="t", format="ascend_text", links=tuple(loads), packets=packets, chip=chip)


def slow(verdict):
    return [(link.src, link.dst) for link in verdict.links if link.slow]


def test_one_link_at_half_speed_is_found():
    found = judge_slow_link([traced(*(load(0, n, 15.6) for n in range(1, 7)), load(0, 7, 7.9))])
    assert (found.verdict, slow(found)) == ("slow", [(0, 7)])
    assert "0->7" in found.what


def test_the_median_is_not_pulled_down_by_the_slow_ones():
    found = judge_slow_link([traced(*(load(0, n, 15.0) for n in range(1, 4)), load(0, 4, 3.0), load(0, 5, 11.9))])
    assert slow(found) == [(0, 4), (0, 5)]


def test_kinds_are_not_compared_with_each_other():
    hccs = [load(0, n, 18.0) for n in range(1, 4)]
    rdma = [load(0, n, 6.0, transport="RDMA") for n in range(8, 12)]
    found = judge_slow_link([traced(*hccs, *rdma)])
    assert (found.verdict, slow(found)) == ("none", [])


def test_links_that_carried_little_are_shown_not_judged():
    tiny = [load(1, 0, 0.02, mb=40e-6), load(0, 7, 8.3, mb=0.015)]
    found = judge_slow_link([traced(*(load(0, n, 18.0) for n in range(1, 4)), *tiny)])
    assert found.verdict == "none"
    assert [link.judged for link in found.links if link.num_bytes < MB] == [False, False]


def test_too_few_links_of_a_kind_decide_nothing():
    assert judge_slow_link([traced(load(0, 1, 18.0), load(0, 2, 6.0))]).verdict == "undecidable"
    assert judge_slow_link([traced()]).verdict == "undecidable"


def test_small_packets_are_told_apart_from_a_slow_link():
    healthy = [traced(*(load(rank, n, 15.0) for n in (4, 5)), rank=rank, packet_mb=16) for rank in (0, 1, 2)]
    cut_small = traced(load(3, 4, 6.0), load(3, 5, 6.0), rank=3, packet_mb=1)
    assert judge_slow_link([*healthy, cut_small]).verdict == "small_packets"
    cut_alike = traced(load(3, 4, 6.0), load(3, 5, 15.0), rank=3, packet_mb=16)
    assert judge_slow_link([*healthy, cut_alike]).verdict == "slow"


def test_loads_of_several_steps_are_added_up():
    loads = [LinkLoad(step=n, src=0, dst=1, transport="HCCS", num_bytes=MB, time_ns=MB / (5 + n)) for n in range(3)]
    (link,) = judge_slow_link([traced(*loads)]).links
    assert link.num_bytes == 3 * MB
    assert link.bandwidth_gb_s == 3 / (1 / 5 + 1 / 6 + 1 / 7)


def rule(analysis, name):
    return next(found for found in analysis.named_rules if found.name == name)


def test_bandwidth_is_held_against_the_chips_nominal_maximum_where_it_is_known():
    links = [load(0, n, 15.0) for n in range(1, 4)]
    known = rule(judge([traced(*links, chip="Ascend910B3")]), "bandwidth_0.8_of_maximum")
    assert (known.valid, round(known.value, 3)) == (True, round(15 / 28, 3))
    unknown = rule(judge([traced(*links)]), "bandwidth_0.8_of_maximum")
    assert (unknown.valid, unknown.value) == (False, None)
    small = rule(judge([traced(*links, chip="Ascend910B3", packet_mb=2)]), "bandwidth_0.8_of_maximum")
    assert not small.valid
    assert "small packets" in small.why_not
