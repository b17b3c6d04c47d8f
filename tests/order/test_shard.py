"""Shards deal every sample to exactly one rank, and a run may stop and go on anywhere, with any number of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.order import Shard

sizes = st.integers(1, 9)


def dealt(num_samples: int, micro_batch_size: int, data_size: int, consumed: int = 0) -> list[list[range]]:
    """Per rank, its micro batches."""
    shards = [Shard(micro_batch_size=micro_batch_size, data_rank=r, data_size=data_size) for r in range(data_size)]
    return [
        [
            shard.micro_batch(b, consumed_samples=consumed)
            for b in range(shard.num_micro_batches(num_samples, consumed_samples=consumed))
        ]
        for shard in shards
    ]


def in_turns(per_rank: list[list[range]]) -> list[int]:
    """Samples in the order in which all ranks together consume them."""
    return [sample for turn in zip(*per_rank, strict=True) for micro_batch in turn for sample in micro_batch]


@given(st.integers(0, 200), sizes, sizes)
def test_ranks_share_the_samples_without_overlap_and_drop_only_an_incomplete_turn(
    num_samples: int, micro_batch_size: int, data_size: int
) -> None:
    per_rank = dealt(num_samples, micro_batch_size, data_size)
    assert len({len(batches) for batches in per_rank}) == 1, "a rank with more micro batches than another would hang"
    turn = micro_batch_size * data_size
    assert in_turns(per_rank) == list(range(num_samples // turn * turn))
    assert all(len(batch) == micro_batch_size for batches in per_rank for batch in batches)


@given(st.integers(0, 300), sizes, sizes, st.lists(st.tuples(sizes, sizes, st.integers(0, 5)), max_size=5))
def test_a_run_resumed_with_other_sizes_reads_what_an_uninterrupted_one_reads(
    num_samples: int, micro_batch_size: int, data_size: int, interruptions: list[tuple[int, int, int]]
) -> None:
    consumed, seen = 0, []
    for other_batch, other_size, turns in interruptions:
        shard = Shard(micro_batch_size=other_batch, data_size=other_size)
        turns = min(turns, shard.num_micro_batches(num_samples, consumed_samples=consumed))
        seen += in_turns([batches[:turns] for batches in dealt(num_samples, other_batch, other_size, consumed)])
        consumed += turns * shard.samples_per_turn
    seen += in_turns(dealt(num_samples, micro_batch_size, data_size, consumed))
    # Nothing twice, nothing skipped; only less than one turn is left over at the very end.
    assert seen == list(range(len(seen)))
    assert 0 <= num_samples - len(seen) < micro_batch_size * data_size


def test_the_example_of_megatrons_sampler() -> None:
    """12 samples, 2 ranks, micro batch 3: rank 1 takes 3-5 and 9-11."""
    shard = Shard(micro_batch_size=3, data_rank=1, data_size=2)
    assert [list(shard.micro_batch(b)) for b in range(shard.num_micro_batches(12))] == [[3, 4, 5], [9, 10, 11]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch_size": 0}, "`micro_batch_size` must be at least 1, got 0"),
        ({"data_rank": 2, "data_size": 2}, r"`data_rank` must lie in \[0, data_size\), got 2 of 2"),
        ({"data_rank": -1}, "`data_rank`"),
        ({"data_size": 0}, "`data_rank`"),
    ],
)
def test_shards_that_mean_nothing(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Shard(**options)


def test_a_position_before_the_beginning() -> None:
    with pytest.raises(ConfigError, match="`consumed_samples` must not be negative, got -1"):
        Shard().num_micro_batches(5, consumed_samples=-1)
    with pytest.raises(ConfigError, match="`consumed_samples`"):
        Shard().micro_batch(0, consumed_samples=-1)
