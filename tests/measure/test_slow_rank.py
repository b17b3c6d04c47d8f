"""Who do the others wait for: named only when it is much and stays so."""

import random
from dataclasses import replace

import pytest

from headrace.errors import ConfigError
from headrace.measure.slow_rank import RankWindow, SlowRankWatch


def window(number, *, late=None, late_s=0.0, noise=0.001, ranks=4, seed=0, **of_late):
    """Ranks that compute 0.8 s of a 1 s step and wait for the slowest; `late` takes `late_s` longer."""
    random_ = random.Random(seed + number)
    rows = []
    for rank in range(ranks):
        extra = late_s if rank == late else 0.0
        fields = {"data_s": 0.01, "computing_s": 0.8 + extra, "host_s": 0.01, "work": 100.0}
        if rank == late:
            fields |= of_late
        wait = late_s - extra + 0.05 + random_.random() * noise
        rows.append(RankWindow(rank=rank, window=number, step_s=1.0 + late_s, wait_s=wait, **fields))
    return rows


def verdict_after(windows, groups=None):
    watch = SlowRankWatch(groups)
    verdict = None
    for rows in windows:
        verdict = watch.judge(rows)
    return verdict


def test_the_rank_that_waits_least_is_the_one_the_others_wait_for():
    got = verdict_after([window(number, late=2, late_s=0.2) for number in range(5)])
    assert (got.rank, got.cause, got.windows) == (2, "card", 5)
    assert got.share == pytest.approx(0.2 / 1.2, rel=0.02)
    assert got.persistence == 1.0


def test_a_healthy_job_accuses_nobody():
    got = verdict_after([window(number, noise=0.02) for number in range(20)])
    assert got.rank is None
    assert "never wait" in got.reason


def test_a_small_lag_is_not_worth_a_name():
    assert verdict_after([window(number, late=1, late_s=0.02) for number in range(10)]).rank is None


def test_two_windows_are_too_few():
    got = verdict_after([window(number, late=1, late_s=0.5) for number in range(2)])
    assert got.rank is None
    assert "2 of 3" in got.reason


def test_a_rank_that_is_late_now_and_then_is_not_the_slow_rank():
    windows = [window(number, late=number % 4, late_s=0.3) for number in range(12)]
    got = verdict_after(windows)
    assert got.rank is None
    assert "no rank is late in 70%" in got.reason


def test_lateness_that_wanders_with_the_lengths_is_the_datas():
    windows = [window(number, late=number % 4, late_s=0.3, work=150.0) for number in range(12)]
    assert "balance the batches" in verdict_after(windows).reason


@pytest.mark.parametrize(
    ("of_late", "cause"),
    [
        ({"work": 100.0}, "card"),
        ({"work": 130.0}, "data"),
        ({"work": None}, "unknown"),
        ({"computing_s": 0.8, "data_s": 0.21}, "host"),
        ({"computing_s": 0.8, "host_s": 0.21}, "host"),
        ({"computing_s": None, "data_s": None, "host_s": None}, "unknown"),
    ],
)
def test_the_cause_is_where_its_extra_time_is(of_late, cause):
    got = verdict_after([window(number, late=3, late_s=0.2, **of_late) for number in range(4)])
    assert (got.rank, got.cause) == (3, cause)


def test_stages_of_a_pipeline_are_not_compared_with_each_other():
    """Ranks 0 and 1 hold a heavier stage and wait little: that is the partition, not a slow rank."""
    windows = [
        [
            RankWindow(rank=rank, window=number, step_s=1.0, wait_s=0.05 if rank < 2 else 0.4, data_s=0.0,
                       computing_s=0.9 if rank < 2 else 0.5, host_s=0.0)
            for rank in range(4)
        ]
        for number in range(5)
    ]  # fmt: skip
    assert verdict_after(windows).rank is not None
    assert verdict_after(windows, groups=[[0, 1], [2, 3]]).rank is None


def test_a_slow_rank_inside_one_stage_is_found():
    windows = [window(number, late=3, late_s=0.2) for number in range(5)]
    assert verdict_after(windows, groups=[[0, 1], [2, 3]]).rank == 3


def test_without_measured_communication_there_is_no_verdict():
    rows = [replace(row, wait_s=None) for row in window(0)]
    assert "wrap the collectives" in SlowRankWatch().judge(rows).reason


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rank reported"),
        (window(0, ranks=1), "waits for nobody"),
        (window(0, ranks=2) + window(1, ranks=2), "different windows"),
    ],
)
def test_no_samples_are_none_with_a_reason_not_nan(rows, words):
    got = SlowRankWatch().judge(rows)
    assert got.rank is None
    assert words in got.reason


def test_a_rank_that_stops_reporting_is_said():
    watch = SlowRankWatch()
    for number in range(8):
        watch.judge(window(number, late=2, late_s=0.3))
    got = watch.judge([row for row in window(8, late=2, late_s=0.3) if row.rank != 2])
    assert got.rank is None
    assert "no longer reports" in got.reason


def test_rows_travel_as_plain_numbers():
    for row in (window(3, late=1, late_s=0.1)[1], RankWindow(rank=0, window=1, step_s=1, wait_s=None, data_s=None,
                                                             computing_s=None, host_s=None)):  # fmt: skip
        assert RankWindow.from_row(row.row()) == row


def test_a_rank_belongs_to_one_group():
    with pytest.raises(ConfigError):
        SlowRankWatch([[0, 1], [1, 2]])
