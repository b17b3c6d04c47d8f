"""NaN, infinity, negative: a measured value is then no measurement, an argument a named error; nothing travels on."""

import math

import pytest

from headrace.errors import ConfigError
from headrace.measure.bandwidth import Transfer, bandwidth_ratios, bus_bandwidth, training_efficiency_of_trace
from headrace.measure.batch_size import find_batch_size
from headrace.measure.compare import compare_runs
from headrace.measure.flops import ModelShape, utilisation, work_of
from headrace.measure.linearity import linearity, strong_scaling, weak_scaling
from headrace.measure.memory import estimate_memory
from headrace.measure.throughput import StepWork, samples_per_second, throughput

NAN, INF = math.nan, math.inf
SIZES = {"layers": 2, "hidden": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "ffn": 8, "gated": False, "vocab": 8}
SHAPE = ModelShape(**SIZES)
MEMORY = {"sequence_length": 8, "micro_batch_size": 1, "recompute": "none"}
not_measured = pytest.mark.parametrize("bad", [NAN, INF, -INF, -1.0])


def link_ratio(*, nbytes=1e9, seconds=1.0, nominal=28.0):
    return bandwidth_ratios([Transfer(transport="HCCS", nbytes=nbytes, seconds=seconds)], {"HCCS": nominal})[
        "HCCS"
    ].ratio


@not_measured
@pytest.mark.parametrize(
    "figure",
    [
        lambda bad: samples_per_second(8, 1, bad),
        lambda bad: throughput([StepWork(seconds=bad, samples=8, tokens=8)]).tokens_per_s,
        lambda bad: linearity(bad, 1.0, 2.0),
        lambda bad: linearity(1.0, bad, 2.0),
        lambda bad: weak_scaling(1.0, bad),
        lambda bad: strong_scaling(bad, 1.0, 2.0).speedup,
        lambda bad: strong_scaling(1.0, 1.0, bad).efficiency,
        lambda bad: bus_bandwidth("all_reduce", 1e9, 8, bad),
        lambda bad: bus_bandwidth("all_reduce", bad, 8, 1.0),
        lambda bad: training_efficiency_of_trace(bad, 1.0).value,
        lambda bad: training_efficiency_of_trace(1.0, bad).value,
        lambda bad: link_ratio(nbytes=bad),
        lambda bad: link_ratio(seconds=bad),
        lambda bad: link_ratio(nominal=bad),
        lambda bad: utilisation(bad, step_seconds=1.0, num_devices=1, peak_flops_per_device=1e12).value,
        lambda bad: utilisation(1e12, step_seconds=bad, num_devices=1, peak_flops_per_device=1e12).value,
        lambda bad: utilisation(1e12, step_seconds=1.0, num_devices=1, peak_flops_per_device=bad).value,
    ],
)
def test_a_measured_value_that_cannot_be_gives_none(figure, bad):
    assert figure(bad) is None


@pytest.mark.parametrize("bad", [NAN, INF, -1, 1.5, "8", True])
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda bad: samples_per_second(bad, 1, 1.0), "batch_size"),
        (lambda bad: samples_per_second(1, bad, 1.0) if bad is not True else samples_per_second(1, 0, 1.0), "parallel"),
        (lambda bad: StepWork(seconds=1.0, tokens=bad), "tokens"),
        (lambda bad: throughput([], num_devices=bad), "num_devices"),
        (lambda bad: work_of([bad], attention="causal"), "document"),
        (lambda bad: work_of([8], attention="causal", window=bad), "window"),
        (lambda bad: ModelShape(**SIZES | {"layers": bad}), "layers"),
        (lambda bad: ModelShape(**SIZES | {"ffn": bad}), "ffn"),
        (lambda bad: estimate_memory(SHAPE, **MEMORY | {"sequence_length": bad}), "sequence_length"),
        (lambda bad: find_batch_size(None, upper=bad), "upper"),
        (lambda bad: find_batch_size(None, multiple=bad, upper=8), "multiple"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_by_name(call, words, bad):
    with pytest.raises(ConfigError, match=words):
        call(bad)


@pytest.mark.parametrize("bad", [NAN, -0.1, INF])
def test_a_share_that_cannot_be_is_refused_by_name(bad):
    with pytest.raises(ConfigError, match="tolerance"):
        find_batch_size(None, upper=16, tolerance=bad)
    with pytest.raises(ConfigError, match="smallest_effect"):
        compare_runs(None, None, smallest_effect=bad)


def test_more_real_tokens_than_computed_ones_are_no_padding():
    assert throughput([StepWork(seconds=1.0, tokens=8, padded_tokens=4)]).padding_ratio is None


def test_an_unknown_kind_of_recompute_is_refused_by_the_estimate_too():
    with pytest.raises(ConfigError, match="recompute"):
        estimate_memory(SHAPE, **MEMORY | {"recompute": "some"})
