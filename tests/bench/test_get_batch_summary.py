"""Ratios and verdicts from rows whose answer is known."""

from __future__ import annotations

import pytest

from headrace.bench.get_batch_case import Block, Case, Cost
from headrace.bench.get_batch_rank import merge, turns
from headrace.bench.get_batch_summary import summarise

STEADY = (0.98, 0.99, 1.0, 1.0, 1.01, 1.02)


def row(contender, median_us, *, tp=4, seq_length=4096, pace_ms=5.0, writer_cpu=0.05, host=20.0, read=8194.0):
    return {
        "contender": contender,
        "tp": tp,
        "micro_batch_size": 1,
        "seq_length": seq_length,
        "pace_ms": pace_ms,
        "group_median_us": median_us,
        "writer_cpu": writer_cpu,
        "host_rss_mb": host,
        "bytes_read_per_step": read,
        "block_medians_us": [median_us * wobble for wobble in STEADY],
    }


def figure(summary, words):
    (found,) = [one for one in summary["figures"] if words in one["what"]]
    return found


def test_a_slower_contender_is_a_ratio_above_one():
    summary = summarise([row("broadcast", 6000.0), row("headrace", 40.0)])
    (ratio,) = summary["ratios"]
    assert ratio["over_headrace"] == "broadcast"
    assert ratio["ratio"] == pytest.approx(150.0)
    assert ratio["low"] <= 150.0 <= ratio["high"]
    assert ratio["verdict"] == "better"
    assert summary["others_win"] == []
    assert figure(summary, "broadcast (gloo), TP=4, 1 x 4096")["value"] == pytest.approx(150.0)
    assert figure(summary, "broadcast (gloo), TP=4, 1 x 4096")["reached"] is True
    assert figure(summary, "broadcast (gloo), TP=4, 1 x 131072")["reached"] is None


def test_a_faster_contender_is_said_to_win():
    summary = summarise([row("iceoryx2", 20.0), row("headrace", 40.0)])
    assert [one["over_headrace"] for one in summary["others_win"]] == ["iceoryx2"]
    assert figure(summary, "iceoryx2")["value"] == pytest.approx(0.5)
    assert figure(summary, "iceoryx2")["reached"] is False


def test_a_missed_figure_is_missed():
    summary = summarise([row("broadcast", 6000.0), row("headrace", 100.0, writer_cpu=0.2)])
    assert figure(summary, "over broadcast (gloo), TP=4, 1 x 4096")["reached"] is False
    assert figure(summary, "feeder")["reached"] is False


def test_few_blocks_give_no_verdict():
    rows = [row("broadcast", 6000.0), row("headrace", 40.0)]
    for one in rows:
        one["block_medians_us"] = one["block_medians_us"][:5]
    (ratio,) = summarise(rows)["ratios"]
    assert ratio["verdict"] == "cannot tell"
    assert ratio["low"] is None
    assert "needs at least 6" in ratio["reason"]


def test_shared_memory_and_reading_are_compared_with_replicated():
    rows = [row("replicated", 3000.0, tp=8, host=400.0, read=65552.0), row("headrace", 40.0, tp=8, host=50.0)]
    summary = summarise(rows)
    assert figure(summary, "host memory")["value"] == pytest.approx(1 / 8)
    assert figure(summary, "bytes read")["value"] == pytest.approx(1 / 8)
    assert figure(summary, "bytes read")["reached"] is True
    rows[0]["bytes_read_per_step"] = 8194.0
    assert figure(summarise(rows), "bytes read")["reached"] is False
    for one in rows:
        one["host_rss_mb"] = None
    assert figure(summarise(rows), "host memory")["reached"] is None


def test_the_order_rotates_and_everybody_has_every_pace():
    case = Case(
        num_ranks=2, source={}, contenders=("a", "b", "c"), paces_ms=(5.0, 0.0), num_blocks=2, steps_per_block=1,
        lead_in_steps=0, num_slots=4, iceoryx2_place=None, folder="",
    )  # fmt: skip
    order = list(turns(case))
    assert "".join(name for name, _ in order) == "abcabcbcabca"
    assert [pace for _, pace in order] == [5.0] * 3 + [0.0] * 3 + [5.0] * 3 + [0.0] * 3


def test_a_step_counts_with_its_slowest_rank_and_costs_add_up():
    cost = Cost(wall_s=2.0, rank_cpu_s=0.5, writer_cpu_s=0.25, bytes_read=100)
    late = Cost(wall_s=3.0, rank_cpu_s=1.0, writer_cpu_s=0.0, bytes_read=0)
    assert merge([([90, 1, 5], cost), ([80, 4, 2], late)], 1) == Block(
        waits_ns=(4, 5),
        lead_in_ns=(90,),
        cost=Cost(wall_s=3.0, rank_cpu_s=1.5, writer_cpu_s=0.25, bytes_read=100),
    )
