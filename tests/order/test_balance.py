"""Dealing out: the same samples, never worse than before, near a bound that nobody beats; and exact continuation."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError, FormatError
from headrace.order import (
    BalancedShard,
    Dealing,
    Part,
    StepShape,
    cost_of,
    deal,
    laid_out_lengths,
    lowest_slowest_rank,
    measured_attention_cost,
    step_cost,
    turn_of,
)

shapes = st.builds(
    StepShape, data_size=st.integers(1, 6), micro_batches=st.integers(1, 5), micro_batch_size=st.integers(1, 3)
)
steps = shapes.flatmap(
    lambda shape: st.tuples(
        st.just(shape), st.lists(st.integers(0, 2**60), min_size=shape.num_samples, max_size=shape.num_samples)
    )
)


@given(steps)
def test_a_dealt_step_has_the_same_samples_costs_no_more_and_keeps_to_the_bound(step):
    shape, costs = step
    order = deal(costs, shape)
    stored = list(range(shape.num_samples))
    assert sorted(order) == stored
    assert order == deal(list(costs), shape)
    assert step_cost(costs, order, shape).slowest_rank <= step_cost(costs, stored, shape).slowest_rank
    assert step_cost(costs, order, shape).slowest_rank >= lowest_slowest_rank(costs, shape)
    assert step_cost(costs, order, shape).slowest_turns >= step_cost(costs, order, shape).slowest_rank


@given(st.lists(st.integers(0, 99), min_size=8, max_size=8))
def test_two_ranks_of_four_beside_all_ways_there_are(costs):
    shape = StepShape(data_size=2, micro_batches=4, micro_batch_size=1)
    best = min(max(taken, sum(costs) - taken) for taken in (sum(some) for some in combinations(costs, 4)))
    found = step_cost(costs, deal(costs, shape), shape).slowest_rank
    assert lowest_slowest_rank(costs, shape) <= best <= found
    assert found <= best * 1.1 + 1


@pytest.mark.parametrize("data_size", [2, 8, 32])
def test_long_tails_are_within_five_percent_of_the_mean_unless_one_document_prevents_it(data_size):
    """Rows of 8192 tokens, mostly attention, so that rows differ much; the figure is 1.05."""
    random = np.random.default_rng(5)
    shape = StepShape(data_size=data_size, micro_batches=8, micro_batch_size=1)
    reached = 0
    for _ in range(6):
        costs = []
        for _ in range(shape.num_samples):
            drawn = np.maximum(1, random.lognormal(np.log(200), 1.9, 400)).astype(int)
            ends = np.minimum(np.cumsum(drawn), 8192)
            costs.append(cost_of([int(n) for n in np.diff(ends, prepend=0) if n], 1 / 1000))
        before = step_cost(costs, range(len(costs)), shape)
        after = step_cost(costs, deal(costs, shape), shape)
        bound = lowest_slowest_rank(costs, shape) / after.mean_rank
        assert after.spread <= max(1.05, bound * 1.001)
        assert after.slowest_turns < before.slowest_turns
        reached += after.spread <= 1.05 < before.spread
    assert reached >= 1, "there was something to balance"


def test_one_sample_above_all_others_is_the_bound():
    shape = StepShape(data_size=2, micro_batches=2, micro_batch_size=1)
    costs = [1, 1, 1, 100]
    assert lowest_slowest_rank(costs, shape) == 101
    assert step_cost(costs, deal(costs, shape), shape).slowest_rank == 101
    assert lowest_slowest_rank([100, 100, 100, 0], shape) == 200, "of three, one rank takes two"


def test_equals_meet_equals_in_a_turn():
    shape = StepShape(data_size=2, micro_batches=3, micro_batch_size=1)
    costs = [50, 1, 20, 20, 1, 50]
    order = deal(costs, shape)
    assert [costs[sample] for sample in order] == [50, 50, 20, 20, 1, 1]
    assert step_cost(costs, order, shape).slowest_turns == 71
    assert step_cost(costs, range(6), shape).slowest_turns == 120


# -- costs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "extra", "multiple", "segments"),
    [
        ([3, 6], 1, 1, [3, 5]),  # nine tokens with the extra one
        ([3, 5, 1], 1, 1, [3, 5]),  # the last document gave the extra token only
        ([3, 1, 1], 1, 1, [3, 5]),  # the same where the row is not full
        ([3, 2], 1, 1, [3, 5]),  # padding goes to the last document
        ([3, 2], 0, 4, [4, 4]),
        ([3, 5], 0, 1, [3, 5]),
        ([], 0, 1, [8]),
    ],
)
def test_segments_are_those_of_the_row(lengths, extra, multiple, segments):
    parts = [Part(document, 0, length) for document, length in enumerate(lengths)]
    assert laid_out_lengths(parts, sequence_length=8, extra=extra, pad_documents_to=multiple) == segments


def test_a_cost_is_tokens_and_squares():
    assert cost_of([3, 5], 0.0) == 8 * 2**40
    assert cost_of([3, 5], 0.5) == (8 + 17) * 2**40


def test_coefficients_from_measured_micro_batches():
    tokens, squares = np.array([4096, 4096, 8192, 8192]), np.array([4096**2, 10**6, 8192**2, 3 * 10**6])
    attention, per_token = measured_attention_cost(tokens, squares, 2e-6 * (tokens + squares / 30_000))
    assert attention == pytest.approx(1 / 30_000)
    assert per_token == pytest.approx(2e-6)
    with pytest.raises(ConfigError, match="2 measured micro batches do not tell tokens from attention"):
        measured_attention_cost([4096, 4096], [10**6, 10**6], [0.1, 0.1])


# -- shards ------------------------------------------------------------------------------------------------------------

CONSTANT_SEED_COSTS = np.random.default_rng(3).lognormal(0, 1, 500).tolist()


def cost(sample):
    return int(CONSTANT_SEED_COSTS[sample] * 1000)


def dealt(dealing, num_samples, consumed=0, state=None, turns=None):
    """Turn by turn, what all ranks take; and what a checkpoint holds after each turn."""
    shards = [
        BalancedShard(
            dealing,
            cost,
            data_rank=rank,
            num_samples=num_samples,
            consumed_samples=consumed,
            turn=turn_of(state, dealing),
        )
        for rank in range(dealing.data_size)
    ]
    assert len({len(shard) for shard in shards}) == 1
    found = []
    for number in range(len(shards[0]) if turns is None else min(turns, len(shards[0]))):
        states = [shard.state_after(number) for shard in shards]
        assert all(one == states[0] for one in states)
        found.append(([shard.micro_batch(number) for shard in shards], states[0]))
    return found


dealings = st.builds(
    Dealing,
    data_size=st.integers(1, 4),
    micro_batches_per_step=st.integers(1, 4),
    micro_batch_size=st.integers(1, 3),
    attention_cost=st.just(0.1),
)


@given(dealings, st.integers(0, 150), st.integers(0, 60))
def test_stopped_at_any_micro_batch_and_continued_it_takes_what_it_would_have_taken(dealing, num_samples, stop):
    whole = dealt(dealing, num_samples)
    turn = dealing.micro_batch_size * dealing.data_size
    taken = Counter(sample for per_rank, _ in whole for rows in per_rank for sample in rows)
    assert taken == Counter(range(num_samples // turn * turn))
    before = whole[:stop]
    state = before[-1][1] if before else None
    assert (state is None) == (len(before) % dealing.micro_batches_per_step == 0)
    assert before + dealt(dealing, num_samples, len(before) * turn, state) == whole


@given(st.lists(st.tuples(dealings, st.integers(0, 3)), max_size=4), st.integers(0, 300))
def test_between_steps_any_other_dealing_continues(runs, num_samples):
    """Other data sizes, steps and micro batches: each step takes the next samples, whoever takes them."""
    consumed, seen = 0, []
    for dealing, num_steps in runs:
        found = dealt(dealing, num_samples, consumed, turns=num_steps * dealing.micro_batches_per_step)
        if len(found) < num_steps * dealing.micro_batches_per_step:
            break  # the end of the data
        seen += [sample for per_rank, _ in found for rows in per_rank for sample in rows]
        consumed += len(found) * dealing.micro_batch_size * dealing.data_size
    assert sorted(seen) == list(range(consumed))


def test_inside_a_step_only_the_same_dealing_continues():
    dealing = Dealing(data_size=4, micro_batches_per_step=3, micro_batch_size=1, attention_cost=0.1)
    _, state = dealt(dealing, 100)[1]
    assert turn_of(state, dealing) == 2
    other = Dealing(data_size=2, micro_batches_per_step=6, micro_batch_size=1, attention_cost=0.1)
    with pytest.raises(ConfigError, match="after 2 of 3 micro batches of a balanced step, dealt out with data_size 4"):
        turn_of(state, other)
    with pytest.raises(ConfigError, match=r"this job does not balance\. Continue with the former, or from a"):
        turn_of(state, None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"micro_batches_per_step": 0}, "`micro_batches_per_step` must be at least 1, got 0"),
        ({"attention_cost": -1.0}, "`attention_cost` is a small number, not negative, got -1.0"),
        ({"attention_cost": float("nan")}, "`attention_cost`"),
    ],
)
def test_dealings_without_a_meaning(wrong, message):
    usual = {"data_size": 2, "micro_batches_per_step": 2, "micro_batch_size": 1, "attention_cost": 0.1}
    with pytest.raises(ConfigError, match=message):
        Dealing(**usual | wrong)


def test_a_position_that_no_step_has():
    dealing = Dealing(data_size=2, micro_batches_per_step=3, micro_batch_size=1, attention_cost=0.1)
    with pytest.raises(ConfigError, match="2 consumed samples cannot end 2 micro batches into a step"):
        BalancedShard(dealing, cost, data_rank=0, num_samples=50, consumed_samples=2, turn=2)


@pytest.mark.parametrize("state", [5, {}, {"turn": "x", "dealing": {}}, {"turn": 1, "dealing": {"data_size": 2}}])
def test_a_damaged_state_is_refused(state: object) -> None:
    with pytest.raises(FormatError, match="it is none of a balanced step"):
        turn_of(state, None)  # type: ignore[arg-type]
