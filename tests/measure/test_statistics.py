"""Intervals that mean what they say, and refuse to say anything from too little."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.measure.statistics import (
    MIN_BLOCKS,
    block_values,
    has_trend,
    median,
    neighbours_resemble,
    p99,
    quantile,
    ranks,
    ratio_interval,
    ratio_of_sums,
    student_t_quantile,
    sum_over_sum,
    verdict,
)


def test_no_values_have_no_median():
    assert median([]) is None
    assert p99([]) is None


def test_quantiles_by_name_of_the_rule():
    values = [1.0, 2.0, 3.0, 4.0]
    assert median(values) == 2.5
    assert quantile(values, 0.5, interpolation="inverted_cdf") == 2.0
    assert quantile(values, 0.99) == pytest.approx(3.97)
    assert quantile(values, 0.99, interpolation="inverted_cdf") == 4.0


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.inf]])
def test_a_value_that_is_not_a_number_is_refused_not_averaged(values):
    with pytest.raises(ConfigError, match="not finite"):
        median(values)


def test_a_quantile_outside_0_to_1_is_refused():
    with pytest.raises(ConfigError, match="99"):
        quantile([1.0], 99)


# Student's t at 97.5 %, five decimals of any printed table.
@pytest.mark.parametrize(("degrees", "expected"), [(5, 2.57058), (9, 2.26216), (19, 2.09302), (100, 1.98397)])
def test_student_t_quantile_agrees_with_the_printed_tables(degrees, expected):
    assert student_t_quantile(0.975, degrees) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("statistic", ["median", "mean"])
def test_paired_blocks_cancel_a_drift_that_swamps_either_side(statistic):
    """Blocks drift by a factor of 20 while the true ratio is 0.9: only pairing can see it."""
    random = np.random.default_rng(7)
    drift = np.geomspace(1.0, 20.0, 24)
    reference = drift * random.normal(1.0, 0.01, 24)
    candidate = 0.9 * drift * random.normal(1.0, 0.01, 24)
    paired = ratio_interval(candidate, reference, statistic="mean")
    assert paired.low < 0.9 < paired.high
    assert verdict(paired, better="lower") == "better"
    assert verdict(paired, better="higher") == "worse"
    separate = ratio_interval(candidate, reference, statistic=statistic, paired=False)
    assert verdict(separate, better="lower") == "cannot tell"


@pytest.mark.parametrize("num_blocks", [6, 12, 30])
def test_95_percent_intervals_hold_the_truth_that_often(num_blocks):
    """300 repetitions: 92 % is two and a half standard errors below the nominal 95 %."""
    random = np.random.default_rng(3)
    hits = 0
    for seed in range(300):
        drift = random.lognormal(0.0, 0.3, num_blocks)
        candidate = 1.1 * drift * random.lognormal(0.0, 0.05, num_blocks)
        reference = drift * random.lognormal(0.0, 0.05, num_blocks)
        interval = ratio_interval(candidate, reference, resamples=400, seed=seed)
        hits += interval.low <= 1.1 <= interval.high
    assert hits >= 0.92 * 300


def test_equal_contenders_get_no_verdict():
    random = np.random.default_rng(5)
    values = random.normal(1.0, 0.05, (2, 20))
    assert verdict(ratio_interval(values[0], values[1]), better="lower") == "cannot tell"


def test_a_difference_too_small_to_matter_gets_no_verdict():
    reference = np.linspace(1.0, 1.001, 20)
    interval = ratio_interval(0.995 * reference, reference)
    assert verdict(interval, better="lower") == "better"
    assert verdict(interval, better="lower", smallest_effect=0.01) == "cannot tell"


def test_too_few_blocks_give_an_estimate_without_an_interval():
    interval = ratio_interval([1.0] * (MIN_BLOCKS - 1), [2.0] * (MIN_BLOCKS - 1))
    assert (interval.estimate, interval.low, interval.high) == (0.5, None, None)
    assert str(MIN_BLOCKS) in interval.reason
    assert verdict(interval, better="lower") == "cannot tell"
    nothing = ratio_interval([], [])
    assert nothing.estimate is None


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_times_that_cannot_be_are_refused_by_position(bad):
    with pytest.raises(ConfigError, match=r"reference\[1\]"):
        ratio_interval([1.0, 1.0], [1.0, bad])


def test_unequal_sides_cannot_be_paired():
    with pytest.raises(ConfigError, match="candidate has 3 and reference 2"):
        ratio_interval([1.0] * 3, [1.0] * 2)
    assert ratio_interval([1.0] * 9, [1.0] * 8, paired=False).num_blocks == 8


times = st.lists(st.floats(1e-6, 1e6), min_size=MIN_BLOCKS, max_size=20)


@given(times, st.integers(0, 2**32 - 1))
def test_the_same_seed_gives_the_same_interval_and_it_is_ordered(values, seed):
    reference = list(reversed(values))
    one = ratio_interval(values, reference, resamples=50, seed=seed)
    assert one == ratio_interval(values, reference, resamples=50, seed=seed)
    assert one.low <= one.high


@given(times, st.floats(0.1, 10.0))
def test_a_constant_factor_is_found_exactly(values, factor):
    interval = ratio_interval([factor * value for value in values], values, resamples=50)
    assert interval.low == pytest.approx(factor)
    assert interval.high == pytest.approx(factor)


def test_long_inputs_are_resampled_in_bounded_memory(monkeypatch):
    """Nine draws at a time with eight blocks: every row is its own chunk and the result still spans the draws."""
    monkeypatch.setattr("headrace.measure.statistics.DRAWS_AT_ONCE", 9)
    interval = ratio_interval(range(1, 9), [1.0] * 8, resamples=200)
    assert interval.low < 4.5 < interval.high


def test_blocks_are_means_of_neighbours():
    assert block_values([1, 3, 5, 7, 10], 2).tolist() == [3.0, 8.5]
    assert block_values([1.0, 2.0], 10).tolist() == [1.0, 2.0]
    assert block_values([], 4).size == 0


def test_a_ratio_of_sums_weighs_blocks_by_their_length_and_turns_over_exactly():
    """Two steps of 1 s and one of 10 s hold a token each: 3 tokens in 12 s, not the mean rate of 0.7."""
    work = np.array([[1.0, 1.0], [1.0, 1.0], [1.0, 10.0]] * 4)
    twice = work * [2.0, 1.0]
    assert sum_over_sum(work) == 0.25
    rate, time = ratio_of_sums(twice, work), ratio_of_sums(twice[:, ::-1], work[:, ::-1])
    assert rate.estimate == 2.0
    assert rate.low < 2.0 < rate.high
    assert (time.low, time.high) == (pytest.approx(1 / rate.high), pytest.approx(1 / rate.low))
    few = ratio_of_sums(twice[:5], work[:5])
    assert (few.estimate, few.low) == (2.0, None)
    assert "5 blocks" in few.reason


@pytest.mark.parametrize("num_blocks", [6, 20])
def test_intervals_of_ratios_of_sums_hold_the_truth_that_often(num_blocks):
    random, hits = np.random.default_rng(4), 0
    for seed in range(300):
        sides = [
            np.stack([np.full(num_blocks, 1e9), seconds * random.lognormal(0.0, 0.1, num_blocks)], 1)
            for seconds in (1.0, 1.1)
        ]
        interval = ratio_of_sums(*sides, resamples=400, seed=seed)
        hits += interval.low <= 1.1 <= interval.high
    assert hits >= 0.92 * 300


@given(times)
def test_a_rate_and_its_reciprocal_have_the_same_neighbours_and_trend(values):
    whole = [round(value * 1e6) for value in values]
    turned = [1.0 / value for value in whole]
    assert neighbours_resemble(whole) == neighbours_resemble(turned)
    assert has_trend(whole) == has_trend(turned)


@pytest.mark.parametrize("num", [6, 8, 20])
def test_a_steady_rise_is_a_trend_and_chance_seldom_is(num):
    random = np.random.default_rng(6)
    assert has_trend(range(num))
    assert has_trend([-value for value in range(num)])
    assert neighbours_resemble(range(num))
    chance = [random.permutation(num) for _ in range(500)]
    assert sum(has_trend(values) for values in chance) <= 0.02 * 500
    assert sum(neighbours_resemble(values) for values in chance) <= 0.06 * 500
    assert not has_trend([1.0] * num)
    assert not neighbours_resemble([1.0] * num)
    assert not has_trend(range(5))


def test_equal_values_share_their_place():
    assert ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [2.5, 0.0, 2.5, 1.0]
