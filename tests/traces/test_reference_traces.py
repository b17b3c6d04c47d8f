"""Real profiles with known answers: every folder gives its answer (skipped where the data is not at hand)."""

from __future__ import annotations

from functools import cache

import pytest

from headrace.traces import analyze, to_document
from headrace.traces.training_log import read_training_log


@cache
def analysed(folder):
    return to_document(analyze([folder]))


@pytest.fixture
def document(reference_traces, request):
    return analysed(reference_traces / request.param)


LANES = {
    "computing_us": "computing_us",
    "communication_us": "communication_us",
    "overlapped_us": "overlapped_us",
    "not_overlapped_us": "communication_not_overlapped_us",
    "free_us": "free_us",
    "free_counting_memcpy_as_free_us": "free_us",
    "device_span_us": "e2e_us",
    "span_us": "e2e_us",
    "e2e_us": "e2e_us",
    "idle_us": "idle_us",
    "memcpy_memset_us": "copies_us",
    "overlap_percent": "overlap_percent",
}


def assert_lanes(row, wanted, tolerance):
    shared = [(name, key) for name, key in LANES.items() if name in wanted]
    assert len(shared) >= 6
    for name, key in shared:
        assert row[key] == pytest.approx(wanted[name], abs=0.01 if key == "overlap_percent" else tolerance), name
    assert row["computing_us"] + row["communication_not_overlapped_us"] + row["free_us"] == pytest.approx(row["e2e_us"])


@pytest.mark.parametrize("document", ["kineto_gpu_A", "kineto_gpu_nccl_A", "edge_sampled_rank"], indirect=True)
def test_breakdown_of_gpu_traces(document, expected, request):
    folder = request.node.callspec.params["document"]
    answer = expected[folder].get("breakdown", expected[folder])
    for row in document["breakdown"]:
        assert_lanes(row, answer["per_step_by_launch"][f"ProfilerStep#{row['step']}"], 0.001)
    assert len(document["breakdown"]) == len(answer["profiler_steps"])
    for row in document["totals"]:
        assert_lanes(row, answer[row["window"]], 0.001)
    assert document["ranks"] == [answer["rank"]]
    assert document["world_size"] == answer["world_size"]
    assert document["inputs"][0]["num_events"] == answer["trace_events"]
    assert (document["slow_rank"]["verdict"], document["slow_rank"]["rank"]) == ("undecidable", None)


@pytest.mark.parametrize("document", ["ascend_text_A", "ascend_db_A"], indirect=True)
def test_ascend_lanes_waits_and_the_rank_nobody_traced(document, expected, request):
    answer = expected[request.node.callspec.params["document"]]
    for row in document["breakdown"]:
        assert_lanes(row, answer["ranks"][str(row["rank"])]["recomputed"], 0.06)
    for row, published in zip(document["breakdown"], document["published"], strict=True):
        for key in ("computing_us", "communication_us", "overlapped_us", "free_us"):
            assert row[key] == pytest.approx(published[key], abs=0.1), key
        assert row["preparing_us"] == pytest.approx(published["preparing_us"], abs=0.1)
    slow = document["slow_rank"]
    assert (slow["rank"], slow["traced"]) == (answer["slow_rank"]["rank"], False)
    assert (slow["num_steps"], slow["sure"]) == (1, "low")
    for row in document["waits"]:
        wanted = answer["slow_rank"]["wait_for_it_ms"][str(row["rank"])]
        assert row["waited_for"][str(slow["rank"])] / 1000 == pytest.approx(wanted, rel=0.01)
        assert row["by_duration_us"] / 1000 == pytest.approx(
            answer["between_traced_ranks"]["total_wait_ms"][str(row["rank"])], abs=0.001
        )
    offset = answer["clock_offset_rank1_minus_rank0_us"]
    assert document["clock_offsets"][1]["offset_us"] == pytest.approx(offset["value"], abs=offset["tolerance"])
    assert document["world_size"] == answer["world_size_visible"]
    assert document["slow_link"]["verdict"] == "none"


@pytest.mark.parametrize("document", ["ascend_text_A"], indirect=True)
def test_the_guides_ratios_come_out_and_are_marked_invalid(document):
    rule = next(rule for rule in document["named_rules"] if rule["name"] == "wait_ratio_spread_0.2")
    assert rule["detail"] == {"0": 0.6173, "1": 0.0472}
    assert (rule["accuses"], rule["valid"]) == (1, False)


@pytest.mark.parametrize("document", ["ascend_db_A"], indirect=True)
def test_the_guides_ratios_of_the_database(document):
    rule = next(rule for rule in document["named_rules"] if rule["name"] == "wait_ratio_spread_0.2")
    assert rule["detail"] == {"0": 0.4807, "1": 0.4885}
    assert rule["accuses"] is None


@pytest.mark.parametrize("document", ["ascend_text_A", "link_A"], indirect=True)
def test_links_against_the_median_of_their_kind(document, expected, request):
    answer = expected[request.node.callspec.params["document"]]["links"]
    wanted = {tuple(map(int, key.split()[-1].split("-"))): row for key, row in answer["links"].items()}
    links = {(link["src"], link["dst"]): link for link in document["slow_link"]["links"]}
    assert links.keys() == wanted.keys()
    for ends, link in links.items():
        assert link["bandwidth_gb_s"] == pytest.approx(wanted[ends]["bandwidth_GBps"], rel=0.001)
        ratio = link["bandwidth_gb_s"] / link["expected_gb_s"]
        assert ratio == pytest.approx(wanted[ends]["ratio_to_type_median"], abs=0.002)
        assert link["transport"] == wanted[ends]["transport"]
    slow = [tuple(map(int, key.split()[-1].split("-"))) for key in answer["slow_links"]]
    assert [ends for ends, link in links.items() if link["slow"]] == slow
    assert document["slow_link"]["verdict"] == ("slow" if slow else "none")


@pytest.mark.parametrize("document", ["gloo4_A", "gloo4_B"], indirect=True)
def test_gloo_jobs(document, expected, request):
    answer = expected[request.node.callspec.params["document"]]
    for row in document["breakdown"]:
        wanted = next(own for own in answer["step_breakdown"][str(row["rank"])] if own["step"] == row["step"])
        assert_lanes(row, wanted, 0.001)
    for row in document["waits"]:
        rank = str(row["rank"])
        assert row["wait_us"] / 1000 == pytest.approx(answer["wait_ms_per_rank"][rank], abs=0.001)
        steps = {step: us / 1000 for step, us in row["by_step_us"].items()}
        assert steps == pytest.approx(answer["wait_ms_per_rank_step"][rank], abs=0.001)
    offsets = {str(row["rank"]): row["offset_us"] for row in document["clock_offsets"][1:]}
    assert offsets == pytest.approx(answer["end_offset_to_rank0_us"], abs=0.001)
    assert document["slow_rank"]["rank"] == answer["slow_rank"]["rank"]
    assert document["unmatched_collectives"] == 0
    assert document["collectives"]["groups"][0]["paired"] == 4 * len(answer["steps"])


@pytest.mark.parametrize("document", ["gloo4_B"], indirect=True)
def test_the_injected_delay_is_measured(document, expected):
    slow = document["slow_rank"]
    assert (slow["verdict"], slow["sure"], slow["steps_late"]) == ("card", "high", 8)
    injected_us = expected["gloo4_B"]["injected"]["extra_ms"] * 1000
    assert slow["lateness_us_per_step"] == pytest.approx(injected_us, rel=0.1)
    assert slow["evidence"]["excess_us_per_step"]["computing"] == pytest.approx(injected_us, rel=0.1)


@pytest.mark.parametrize("document", ["gloo4_A"], indirect=True)
def test_the_healthy_job_is_called_healthy(document):
    assert document["slow_rank"]["verdict"] == "none"


@pytest.mark.parametrize("document", ["bytedance_op_level_A"], indirect=True)
def test_the_table_of_operations(document, expected):
    answer = expected["bytedance_op_level_A"]
    assert document["ranks"] == answer["ranks"]
    assert len(document["steps"]) == answer["steps"]
    assert sum(entry["num_events"] for entry in document["inputs"]) == answer["rows"]
    slow = document["slow_rank"]
    assert (slow["verdict"], slow["rank"], slow["steps_late"]) == ("card", answer["slow_rank"]["rank"], 16)
    ratios = slow["evidence"]["computing_over_median_of_stage"]
    assert ratios == pytest.approx(answer["median_ratio_to_stage_median"], abs=answer["tolerances"]["ratio"])


@pytest.mark.parametrize("document", ["ascend_cluster_output_A"], indirect=True)
def test_the_merged_tables_accuse_nobody(document, expected):
    answer = expected["ascend_cluster_output_A"]
    assert (document["ranks"], document["world_size"]) == (answer["ranks_in_files"], answer["world_size"])
    assert document["steps"] == answer["steps"]
    assert (document["slow_rank"]["verdict"], document["slow_rank"]["rank"]) == ("undecidable", None)
    assert not any(link["slow"] for link in document["slow_link"]["links"])
    by_pair = {(link["src"], link["dst"]): link for link in document["slow_link"]["links"]}
    assert by_pair[0, 8]["bandwidth_gb_s"] == pytest.approx(24.2778, rel=0.001)
    assert not by_pair[1, 0]["judged"]
    broadcasts = [row for row in document["collectives"]["slowest"] if row["kind"] == "broadcast"]
    assert [row["waited_us"] / 1000 for row in broadcasts] == pytest.approx([3.6955, 0.2928], abs=0.001)


@pytest.mark.parametrize("document", ["edge_no_distributed_info", "edge_no_rank", "edge_cpu_only"], indirect=True)
def test_incomplete_traces_say_what_is_missing(document, expected, request):
    answer = expected[request.node.callspec.params["document"]]
    assert document["ranks"] == ([] if answer["rank"] is None else [answer["rank"]])
    assert document["world_size"] == answer["world_size"]
    assert document["inputs"][0]["num_events"] == answer["trace_events"]
    assert document["breakdown"] == []
    notes = " ".join(document["inputs"][0]["notes"])
    assert "no device events" in notes
    assert ("does not say its rank" in notes) == (answer["rank"] is None)
    assert document["slow_rank"]["verdict"] == "undecidable"


@pytest.mark.parametrize("document", ["edge_sampled_rank"], indirect=True)
def test_pairing_is_refused_without_evidence(document):
    assert document["collectives"]["groups"] == []
    assert document["collectives"]["cannot_pair"][0]["count"] == 10


def test_the_training_log(reference_traces, expected):
    answer = expected["training_log_A"]
    log = read_training_log(reference_traces / "training_log_A" / "baseline.json")
    assert (log.num_steps, log.warm_up_steps, log.num_devices) == (20, 1, answer["devices"])
    assert log.published_tflops_per_device == answer["published_tflops_per_device_median"]
    rate = log.tokens_per_s(answer["tokens_per_step"])
    assert rate == pytest.approx(answer["tokens_per_s_median_without_first"], abs=0.01)
    found = log.tflops_per_device(answer["model_flops_per_step"])
    assert found == pytest.approx(answer["computed_tflops_per_device_median"], abs=0.001)
    assert found == pytest.approx(log.published_tflops_per_device, rel=answer["tolerance_rel"])
