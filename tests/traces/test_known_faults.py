"""Faults other tools had, by their public thread; each kind must be impossible here.

Those with a test of their own elsewhere: HolisticTraceAnalysis#360, #56, #17, #16, pytorch#60084, torch-xpu-ops#5384 in
test_kineto.py; HolisticTraceAnalysis#241 in test_reference_traces.py; #250 in test_json_events.py; #233 in
test_reading.py; TraceLens#60, pytorch PR#191990 in test_pairing.py; TraceLens#22, attention-gym PR#487, vllm PR#51881,
nsys-ai PR#227 in test_slow_rank.py.
"""

from __future__ import annotations

import pytest

from headrace.errors import FormatError
from headrace.traces import analysis, analyze, to_document
from headrace.traces.kineto import peek_rank

from .kineto_files import envelope, gloo_job, launched, step, write


def test_ranks_are_found_without_reading_the_files(tmp_path, monkeypatch):
    """HolisticTraceAnalysis#24: finding the ranks read every file, one after the other."""
    for name in ("first.json", "second.json"):
        path = write(tmp_path / name, [step(1, 0, 9), *launched(1, 1, "kernel", "gemm", 2, 2)], envelope(3, 8))
        with path.open("ab") as file:
            file.write(b" " * 5_000_000)
    assert peek_rank(tmp_path / "first.json") == (3, 8)

    def refuse(*_, **__):
        raise AssertionError("the files were read although their heads are enough to refuse them")

    monkeypatch.setattr(analysis, "read_inputs", refuse)
    with pytest.raises(FormatError, match=r"rank 3 is there 2 times"):
        analyze([tmp_path])


@pytest.mark.parametrize("offset_us", [79.0, 1e9])
def test_files_whose_clocks_differ_give_the_same_document(tmp_path, offset_us):
    """TraceLens#22, attention-gym PR#487, vllm PR#51881: one host 79 us off, hosts that count from different boots."""
    late = {0: 0, 1: 0, 2: 35, 3: 0}
    here = to_document(analyze([gloo_job(tmp_path / "here", late)]))
    there = to_document(analyze([gloo_job(tmp_path / "there", late, offset_us={1: offset_us})]))
    assert here["slow_rank"]["rank"] == 2
    assert abs(there["clock_offsets"][1]["offset_us"] - offset_us) < 2
    same = ("slow_rank", "slow_link", "named_rules", "waits", "breakdown", "waterfall", "unmatched_collectives")
    assert {key: here[key] for key in same} == {key: there[key] for key in same}


def test_collectives_without_metadata_are_paired_by_order_and_it_says_so(tmp_path):
    """pytorch#131462, chakra#178: coalesced collectives carry no process group."""
    for rank in range(2):
        events = [step(1, 0, 900)]
        for number in range(6):
            name = "ncclDevKernel_AllReduce_Sum_f32(int)" if number % 2 else "ncclDevKernel_AllGather_RING(int)"
            at = 50 * number + 10 * rank
            events += launched(number, at, "kernel", name, at + 20, 30 - 10 * rank)
        write(tmp_path / f"rank_{rank}.json", events, envelope(rank, 2))
    document = to_document(analyze([tmp_path]))
    (group,) = document["collectives"]["groups"]
    assert (group["paired_by"], group["paired"], group["ranks"]) == ("order", 6, [0, 1])
    assert {row["kind"] for row in document["collectives"]["kinds"]} == {"all_reduce", "all_gather"}
    assert [row["wait_us"] for row in document["waits"]] == [60.0, 0.0]


def test_a_job_without_a_common_step_does_not_divide_by_zero(tmp_path):
    """temporal breakdowns of a trace without GPU streams raised IndexError and ValueError in other tools."""
    write(tmp_path / "rank_0.json", [step(1, 0, 0)], envelope(0, 2))
    write(tmp_path / "rank_1.json", [step(2, 0, 0)], envelope(1, 2))
    document = to_document(analyze([tmp_path]))
    assert document["breakdown"] == []
    assert document["slow_rank"]["verdict"] == "undecidable"


def test_equal_step_times_hide_nothing(tmp_path):
    """Synchronous ranks all take as long as the slowest: comparing step times would find nobody."""
    document = to_document(analyze([gloo_job(tmp_path / "job", {0: 0, 1: 0, 2: 0, 3: 30}, steps=6)]))
    e2e = {row["e2e_us"] for row in document["breakdown"]}
    assert max(e2e) - min(e2e) < 1
    assert document["slow_rank"]["rank"] == 3


def test_somebody_is_always_last_but_not_always_to_blame(tmp_path):
    """HolisticTraceAnalysis's get_potential_stragglers names k ranks whatever the trace."""
    document = to_document(analyze([gloo_job(tmp_path / "job", {0: 0.2, 1: 0.1, 2: 0.0, 3: 0.3}, steps=6)]))
    assert (document["slow_rank"]["verdict"], document["slow_rank"]["rank"]) == ("none", None)
