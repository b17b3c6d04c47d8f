"""Rates: sums over sums, with warm-up out and unknown things None."""

import json
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.measure.throughput import StepWork, samples_per_second, throughput

EMPTY = "no step that counts has a time above 0"
VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "flops.json").read_text())


@pytest.mark.parametrize("case", VECTORS["rates"], ids=lambda case: case["name"])
def test_golden_rates(case):
    steps = [  # a vector without padded tokens means rows without padding, which has to be said
        StepWork(
            seconds=step["seconds"], tokens=step["tokens"], padded_tokens=step.get("padded_tokens", step["tokens"])
        )
        for step in case["steps"]
    ]
    got = throughput(steps, num_devices=case["devices"], warmup_steps=case["warmup"])
    for name, mine in [
        ("tokens_per_second", got.tokens_per_s),
        ("padded_tokens_per_second", got.padded_tokens_per_s),
        ("tokens_per_second_per_device", got.tokens_per_s_per_device),
        ("padding_ratio", got.padding_ratio),
    ]:
        assert mine == (None if case[name] is None else pytest.approx(case[name], rel=1e-12)), name
    assert got.reason == ("not counted on every step: samples" if got.tokens_per_s is not None else EMPTY)


def test_25_samples_of_1024_tokens_are_25600_tokens_per_second():
    assert samples_per_second(25, 1, 1.0) * 1024 == 25_600
    got = throughput([StepWork(seconds=1.0, samples=25, tokens=25 * 1024)])
    assert (got.samples_per_s, got.tokens_per_s, got.tokens_per_day) == (25, 25_600, 25_600 * 86_400)


def test_what_was_not_counted_is_named():
    counted = {"samples": 8, "tokens": 8}
    for missing in ("samples", "tokens"):
        got = throughput([StepWork(seconds=1.0, **counted), StepWork(seconds=1.0, **counted | {missing: None})])
        assert got.reason == f"not counted on every step: {missing}"
    assert throughput([StepWork(seconds=1.0, **counted)]).reason is None


def test_padding_that_was_not_counted_is_unknown_not_zero():
    got = throughput([StepWork(seconds=1.0, tokens=100)])
    assert (got.tokens_per_s, got.padded_tokens_per_s, got.padding_ratio) == (100, None, None)
    partly = throughput([StepWork(seconds=1.0, tokens=100, padded_tokens=128), StepWork(seconds=1.0, tokens=100)])
    assert partly.padding_ratio is None


def test_accumulating_four_micro_batches_is_not_four_times_as_fast():
    """DeepSpeed #2090, #2565: the same tokens in the same time, whatever the number of micro batches."""
    once = throughput([StepWork(seconds=2.0, samples=8, tokens=8192)])
    accumulated = throughput([StepWork(seconds=2.0, samples=4 * 2, tokens=4 * 2048)])
    assert once.tokens_per_s == accumulated.tokens_per_s == 4096


@pytest.mark.parametrize("window", [1, 10, 20])
def test_a_window_divides_by_the_steps_it_timed(window):
    """Dividing the first window of one step by the logging interval shows a tenth of its time."""
    got = throughput([StepWork(seconds=0.5, tokens=100)] * window)
    assert got.num_steps == window
    assert got.tokens_per_s == pytest.approx(200)


def test_the_job_is_the_data_parallel_ranks_and_a_device_its_share_of_all():
    got = throughput([StepWork(seconds=1.0, samples=2, tokens=200)], data_parallel_size=4, num_devices=32)
    assert (got.samples_per_s, got.tokens_per_s, got.tokens_per_s_per_device) == (8, 800, 25)


def test_a_step_without_a_count_makes_the_rate_unknown_not_smaller():
    got = throughput([StepWork(seconds=1.0, tokens=100), StepWork(seconds=1.0)])
    assert got.tokens_per_s is None
    assert got.num_steps == 2


@pytest.mark.parametrize("seconds", [0.0, -1.0, None])
def test_steps_without_a_time_are_left_out(seconds):
    got = throughput([StepWork(seconds=seconds, tokens=999), StepWork(seconds=1.0, tokens=100)])
    assert (got.num_steps, got.tokens_per_s) == (1, 100)
    assert samples_per_second(4, 1, seconds or 0.0) is None


@pytest.mark.parametrize("bad", [{"data_parallel_size": 0}, {"num_devices": 0}, {"warmup_steps": -1}])
def test_sizes_below_one_are_refused(bad):
    with pytest.raises(ConfigError):
        throughput([], **bad)
