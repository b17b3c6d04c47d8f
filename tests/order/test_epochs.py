"""EpochOrder: every epoch reads every document once, in an order of its own, and resuming replays nothing."""

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.order import EpochOrder, MegatronOrder, OrderRules, Shard

LENGTHS = np.array([5, 30, 1, 12, 7, 9, 22, 3], np.int32)
RULES = OrderRules(sequence_length=8, seed=2**32 - 2, add_extra_token=False)


def tokens_of(order: EpochOrder, samples: range) -> Counter:
    return Counter(
        (part.document, part.offset + i)
        for sample in samples
        for part in order.parts(sample)
        for i in range(part.length)
    )


def test_each_epoch_is_the_one_epoch_order_of_its_seed() -> None:
    order = EpochOrder(LENGTHS, RULES, num_epochs=4)
    assert len(order) == 4 * order.samples_per_epoch
    for epoch in (0, 3, 1, 2, 2):
        single = MegatronOrder(LENGTHS, replace(RULES, seed=(RULES.seed + epoch) % 2**32))
        first = epoch * order.samples_per_epoch
        assert [order.parts(first + i) for i in range(len(single))] == [single.parts(i) for i in range(len(single))]


def test_no_token_comes_twice_in_an_epoch_and_orders_differ() -> None:
    order = EpochOrder(LENGTHS, RULES, num_epochs=3)
    epochs = [range(e * order.samples_per_epoch, (e + 1) * order.samples_per_epoch) for e in range(3)]
    for epoch in epochs:
        assert set(tokens_of(order, epoch).values()) == {1}
    delivered = [[order.parts(sample) for sample in epoch] for epoch in epochs]
    assert delivered[0] != delivered[1] != delivered[2]


@given(st.integers(0, 44), st.integers(1, 3), st.integers(1, 3))
def test_a_run_that_stops_in_the_middle_of_an_epoch_goes_on_with_the_next_sample(
    consumed: int, micro_batch_size: int, data_size: int
) -> None:
    order = EpochOrder(LENGTHS, RULES, num_epochs=4)
    resumed = EpochOrder(LENGTHS, RULES, num_epochs=4)
    shards = [Shard(micro_batch_size=micro_batch_size, data_rank=r, data_size=data_size) for r in range(data_size)]
    turns = shards[0].num_micro_batches(len(resumed), consumed_samples=consumed)
    seen = [
        resumed.parts(sample)
        for turn in range(turns)
        for shard in shards
        for sample in shard.micro_batch(turn, consumed_samples=consumed)
    ]
    assert seen == [order.parts(sample) for sample in range(consumed, consumed + len(seen))]
