"""The JSON document, version 1: its keys and types are a promise; the perfetto file opens in a viewer."""

from __future__ import annotations

import gzip
import json

import msgspec

from headrace.traces import analyze, to_document
from headrace.traces.perfetto import write_perfetto

from .ascend_files import Profile, write_text
from .kineto_files import gloo_job


def document_of(path, **options):
    return to_document(analyze([path], **options))


def test_the_promised_keys_are_there_with_their_types(tmp_path):
    document = document_of(gloo_job(tmp_path / "job", {0: 0, 1: 40, 2: 0}))
    assert document["version"] == 1
    assert document["ranks"] == [0, 1, 2]
    assert document["steps"] == [0, 1, 2, 3]
    promised = {
        "rank", "step", "computing_us", "communication_us", "communication_not_overlapped_us", "overlapped_us",
        "free_us", "e2e_us",
    }  # fmt: skip
    assert len(document["breakdown"]) == 12
    for row in document["breakdown"]:
        assert promised <= row.keys()
        parts = row["computing_us"] + row["communication_not_overlapped_us"] + row["free_us"]
        assert abs(parts - row["e2e_us"]) < 0.0005
    for row in document["waits"]:
        assert {"rank", "wait_us", "waited_for"} <= row.keys()
        assert all(isinstance(peer, str) for peer in row["waited_for"])
    assert {"verdict", "rank", "traced", "evidence", "sure", "what", "disproved_by"} <= document["slow_rank"].keys()
    assert isinstance(document["slow_rank"]["evidence"], dict)
    assert {"verdict", "links"} <= document["slow_link"].keys()
    assert [rule["name"] for rule in document["named_rules"]] == [
        "wait_ratio_spread_0.2",
        "shortest_communication_time",
        "bandwidth_0.8_of_maximum",
    ]
    assert all(isinstance(rule["valid"], bool) for rule in document["named_rules"])
    assert (document["skipped_events"], document["unmatched_collectives"]) == (0, 0)


def test_links_have_the_promised_keys(tmp_path):
    links = {f"0-{peer}": (30.0, 2.0) for peer in range(1, 5)} | {"0-5": (30.0, 4.0)}
    document = document_of(write_text(tmp_path / "rank0_ascend_pt", Profile(links=links)))
    promised = {"src", "dst", "transport", "bandwidth_gb_s", "expected_gb_s", "slow"}
    assert all(promised <= link.keys() for link in document["slow_link"]["links"])
    slow = [link for link in document["slow_link"]["links"] if link["slow"]]
    assert [(link["src"], link["dst"], link["bandwidth_gb_s"], link["expected_gb_s"]) for link in slow] == [
        (0, 5, 7.5, 15.0)
    ]


def test_the_document_is_plain_json(tmp_path):
    document = document_of(gloo_job(tmp_path / "job", {0: 0, 1: 40}))
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert msgspec.json.decode(msgspec.json.encode(document)) == document


def test_the_waterfall_sums_to_the_step(tmp_path):
    document = document_of(write_text(tmp_path / "rank0_ascend_pt", Profile(receive=(2500, 300))))
    (row,) = document["waterfall"]
    parts = ("matrix_us", "vector_us", "copies_us", "exposed_communication_us", "bubble_us", "free_us")
    assert sum(row[part] for part in parts) == row["e2e_us"]
    assert row["bubble_us"] == 300


def test_collectives_carry_bandwidths_of_the_nccl_tests(tmp_path):
    document = document_of(gloo_job(tmp_path / "job", {0: 0, 1: 0}))
    fast = document["collectives"]["slowest"][0]
    assert fast["num_bytes"] == 16_000  # 4000 float32
    assert fast["algbw_gb_s"] == round(16_000 / (fast["transfer_us"] * 1000), 4)
    assert fast["busbw_gb_s"] == fast["algbw_gb_s"]  # two ranks: 2 (n - 1) / n = 1
    gathered = next(row for row in document["collectives"]["slowest"] if row["kind"] == "all_gather")
    assert gathered["num_bytes"] == 2 * 400  # what everyone gets, not what one gives


def test_all_ranks_share_one_axis_in_the_viewer(tmp_path):
    offset_us = 5_000_000.0
    job = gloo_job(tmp_path / "job", {0: 0, 1: 0, 2: 20}, offset_us={1: offset_us})
    analysis = analyze([job], keep_spans=True)
    path = tmp_path / "all.json.gz"
    count = write_perfetto(path, analysis)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert len(events) == count
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}
    ends = {}
    for event in events:
        if event["ph"] == "X" and event["name"] == "all_reduce":
            ends.setdefault(event["pid"], []).append(event["ts"] + event["dur"])
    for left, right in zip(ends[0], ends[1], strict=True):  # the clocks were 5 s apart
        assert abs(left - right) < 5
    assert min(event["ts"] for event in events if event["ph"] == "X") >= 0
    waits = [event["args"]["wait_us"] for event in events if event["name"] == "all_reduce" and event["pid"] == 0]
    assert len(waits) == 4
    assert all(abs(wait - 20_000) < 1 for wait in waits)
