"""Scaling: the number, what makes it mean something else, and a verdict only when the host is excluded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.measure.linearity import ScalingPoint, compare_scaling, linearity, strong_scaling, weak_scaling

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "flops.json").read_text())

CARD = ScalingPoint(
    num_devices=1,
    num_nodes=1,
    tokens_per_s=1000.0,
    samples_per_data_rank=8.0,
    data_parallel_size=1,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    context_parallel_size=1,
    sequence_length=4096,
    recompute="none",
    dtype="bfloat16",
    device_name="NVIDIA H100 80GB HBM3",
    model="a",
    data_share=0.01,
    host_share=0.01,
)


@pytest.mark.parametrize("case", VECTORS["linearity"], ids=lambda case: case["name"])
def test_golden_linearity(case):
    value = linearity(case["baseline_throughput"], case["scaled_throughput"], case["units"])
    assert value == (None if case["linearity"] is None else pytest.approx(case["linearity"], rel=1e-12))
    small = replace(CARD, tokens_per_s=case["baseline_throughput"])
    large = replace(CARD, num_devices=case["units"], tokens_per_s=case["scaled_throughput"])
    got = compare_scaling(small, large)
    assert (got.superlinear, got.below_limit) == (case["superlinear"], case["below_0.8"])


@pytest.mark.parametrize("case", VECTORS["step_time"], ids=lambda case: case["name"])
def test_golden_step_times(case):
    times = (case["baseline_step_seconds"], case["scaled_step_seconds"])
    if case["kind"] == "weak":
        assert weak_scaling(*times) == pytest.approx(case["linearity"], rel=1e-12)
    else:
        got = strong_scaling(*times, case["devices"])
        assert (got.speedup, got.efficiency) == pytest.approx((case["speedup"], case["efficiency"]), rel=1e-12)


@pytest.mark.parametrize(
    ("small", "large", "kind"),
    [
        ((1, 1), (8, 1), "card -> node"),
        ((1, 1), (32, 4), "card -> cluster"),
        ((8, 1), (32, 4), "node -> cluster"),
        ((4, 1), (32, 4), "4 -> 32 devices"),
        ((8, None), (32, 4), "8 -> 32 devices"),
    ],
)
def test_comparisons_have_names(small, large, kind):
    got = compare_scaling(
        replace(CARD, num_devices=small[0], num_nodes=small[1]), replace(CARD, num_devices=large[0], num_nodes=large[1])
    )
    assert got.kind == kind
    assert got.units == large[0] / small[0]


def scaled(**changes):
    return compare_scaling(CARD, replace(CARD, num_devices=8, **changes))


def test_communication_is_named_only_after_data_and_host_are_excluded():
    assert scaled(tokens_per_s=5000.0).finding == "communication"
    assert scaled(tokens_per_s=5000.0, data_share=0.2).finding == "data or host first"
    assert scaled(tokens_per_s=5000.0, host_share=0.2).finding == "data or host first"
    assert scaled(tokens_per_s=5000.0, data_share=None).finding == "cannot tell"
    assert scaled(tokens_per_s=5000.0, host_share=None).finding == "cannot tell"
    assert scaled(tokens_per_s=7000.0).finding == "good"


def test_above_one_is_shown_and_flagged_not_clamped():
    got = scaled(tokens_per_s=8800.0)
    assert (got.value, got.superlinear) == (pytest.approx(1.1), True)


def test_what_is_not_the_same_is_said_and_nobody_is_judged():
    got = scaled(tokens_per_s=5000.0, samples_per_data_rank=16.0, recompute="full", sequence_length=None)
    assert got.finding == "cannot tell"
    assert got.value == pytest.approx(0.625)
    text = "; ".join(got.differences)
    assert "samples per data-parallel rank and step: 8.0 and 16.0" in text
    assert "recompute: none and full" in text
    assert "sequence length: 4096 and not recorded" in text


def test_a_different_share_of_padding_is_a_difference():
    small = replace(CARD, real_token_share=0.95)
    assert compare_scaling(small, replace(small, num_devices=8, real_token_share=0.60)).differences
    assert not compare_scaling(small, replace(small, num_devices=8, real_token_share=0.945)).differences


def test_samples_stand_in_where_no_tokens_were_counted():
    small = replace(CARD, tokens_per_s=None, samples_per_s=10.0)
    got = compare_scaling(small, replace(small, num_devices=8, samples_per_s=72.0))
    assert (got.by, got.value) == ("samples_per_s", pytest.approx(0.9))
    nothing = compare_scaling(small, replace(small, num_devices=8, samples_per_s=None))
    assert nothing.value is None
    assert nothing.reason


def test_the_second_run_must_be_the_larger_one():
    with pytest.raises(ConfigError, match="8 and then 8"):
        compare_scaling(replace(CARD, num_devices=8), replace(CARD, num_devices=8))


@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_times_that_are_none_give_none(times):
    assert weak_scaling(*times) is None
    assert strong_scaling(*times, 8).efficiency is None
