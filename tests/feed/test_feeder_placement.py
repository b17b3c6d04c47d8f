"""The feeder is where the ranks can use it, or where the user wants it; what cannot be is refused before it starts."""

from __future__ import annotations

import os

import pytest

from headrace.errors import ConfigError
from headrace.feed import Feed, FeedConfig, SourceContext

from .sources import numbers

pytestmark = pytest.mark.usefixtures("watchdog")


def test_the_feeder_runs_where_it_was_told_to_and_stats_say_so() -> None:
    core = min(os.sched_getaffinity(0))
    with Feed(numbers, config=FeedConfig(feeder_cpus=str(core))) as feed:
        next(feed)
        stats = feed.stats()
        assert os.sched_getaffinity(stats.writer_pid) == {core}
        assert stats.placement is not None
        assert stats.placement.startswith(f"cores {core}, ")
        assert "as configured" in stats.placement


def test_left_alone_it_stays_on_cores_that_this_job_may_use() -> None:
    with Feed(numbers) as feed:
        next(feed)
        assert os.sched_getaffinity(feed.stats().writer_pid) <= os.sched_getaffinity(0)


@pytest.mark.parametrize(("cpus", "why"), [("4000", "none of the cores"), ("one", "looks like 0-3,8")])
def test_cores_that_are_none_are_refused(cpus: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Feed(numbers, config=FeedConfig(feeder_cpus=cpus))


def test_a_rank_that_writes_itself_stays_where_it_is() -> None:
    before = os.sched_getaffinity(0)
    with Feed(
        iterator=numbers(SourceContext(data_rank=0, data_size=1, seed=1)),
        writer_rank=0,
        config=FeedConfig(feeder_cpus="0"),
    ) as feed:
        next(feed)
        assert feed.stats().placement is None
    assert os.sched_getaffinity(0) == before
