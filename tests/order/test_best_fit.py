"""Whole documents in rows: nothing lost, nothing split that fits, nothing too full; the same for the same seed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.order.best_fit import BestFitOrder, best_fit, pieces_of
from headrace.order.plan import OrderRules

EXAMPLES = settings(deadline=None, derandomize=True)
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any)


def order_of(lengths, step=16, multiple=1, num_epochs=1, **rules):
    lengths = np.array(lengths, np.int32)
    rules = OrderRules(sequence_length=step, **rules)
    return BestFitOrder(lengths, rules, num_epochs=num_epochs, pad_documents_to=multiple)


def all_parts(order, samples=None):
    return [order.parts(sample) for sample in samples or range(len(order))]


@EXAMPLES
@given(LENGTHS, st.integers(2, 20), st.booleans(), st.integers(0, 3))
def test_every_document_whole_unless_longer_than_a_row(lengths, step, extra, seed):
    order = order_of(lengths, step, add_extra_token=extra, seed=seed)
    rows = all_parts(order)
    row_tokens = step + extra
    assert all(0 < sum(part.length for part in row) <= row_tokens for row in rows)
    pieces = [part for row in rows for part in row]
    for document, length in enumerate(lengths):
        own = sorted((part.offset, part.length) for part in pieces if part.document == document)
        if length <= row_tokens:
            assert own == ([(0, length)] if length else [])
        else:
            assert own[0] == (0, row_tokens)
            for (offset, taken), (following, _) in pairwise(own):
                assert following == offset + taken - extra, "pieces share the extra token and nothing else"
            assert sum(own[-1]) == length
            assert own[-1][1] > extra, "a lone label is no piece"


@EXAMPLES
@given(LENGTHS, st.sampled_from([2, 4, 8]))
def test_padded_documents_fit_as_well(lengths, multiple):
    order = order_of(lengths, 16, multiple)
    for row in all_parts(order):
        assert sum(min(-(-part.length // multiple) * multiple, 16) for part in row) <= 16


@EXAMPLES
@given(LENGTHS, st.integers(0, 9))
def test_epochs_hold_the_same_documents_in_as_many_rows(lengths, seed):
    order = order_of(lengths, num_epochs=3, seed=seed)
    per_epoch = order.samples_per_epoch
    assert len(order) == 3 * per_epoch
    rows = all_parts(order)
    contents = [Counter(part for row in rows[e * per_epoch : (e + 1) * per_epoch] for part in row) for e in range(3)]
    assert contents[0] == contents[1] == contents[2]
    assert all_parts(order_of(lengths, num_epochs=3, seed=seed)) == rows, "the seed decides"
    assert all_parts(order, [0, len(order) - 1, 0]) == [rows[0], rows[-1], rows[0]], "any sample, at any time"


@EXAMPLES
@given(LENGTHS, st.integers(1, 40))
def test_a_number_of_samples_takes_the_first_rows_of_epochs_end_to_end(lengths, num_samples):
    order = order_of(lengths, num_samples=num_samples)
    assert len(order) == num_samples
    epochs = order_of(lengths, num_epochs=-(-num_samples // order.samples_per_epoch) or 1)
    assert all_parts(order, range(num_samples)) == all_parts(epochs, range(num_samples))


def test_seeds_and_epochs_shuffle():
    lengths = list(range(1, 60))
    first = all_parts(order_of(lengths, 64, seed=1, num_epochs=2))
    assert all_parts(order_of(lengths, 64, seed=2, num_epochs=2)) != first
    assert first[: len(first) // 2] != first[len(first) // 2 :]


def plain_best_fit(sizes, capacity):
    rooms, rows = [], []
    for size in sizes:
        fitting = [(room, row) for row, room in enumerate(rooms) if room >= size]
        row = min(fitting)[1] if fitting else len(rooms)
        if not fitting:
            rooms.append(capacity)
        rooms[row] -= size
        rows.append(row)
    return rows, rooms


@EXAMPLES
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60).map(lambda sizes: sorted(sizes, reverse=True)))
def test_the_fullest_row_that_has_room(sizes):
    rows, num_rows = best_fit(sizes, 30)
    _, rooms = plain_best_fit(sizes, 30)
    assert num_rows == len(rooms)
    used = np.bincount(rows, weights=sizes)
    assert sorted(used) == sorted(30 - room for room in rooms)


def test_no_row_more_than_the_tokens_need():
    lengths = np.random.default_rng(0).lognormal(np.log(200), 1.23, 3000).astype(np.int32) + 1
    order = BestFitOrder(lengths, OrderRules(sequence_length=2048, add_extra_token=False))
    pieces = pieces_of(lengths, range(len(lengths)), step=2048, extra=0)
    assert len(order) == -(-int(pieces[:, 2].sum()) // 2048)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_epochs": 0}, "`num_epochs` must be at least 1, got 0"),
        ({"num_samples": 5, "num_epochs": 2}, "give `num_epochs` or `num_samples`, not both: got 2 and 5"),
        ({"multiple": 3}, "`pad_documents_to` must divide the sequence length 16, got 3"),
        ({"lengths": [0, 0]}, "holds no tokens to pack .documents: 2"),
    ],
)
def test_requests_without_an_answer(wrong, message):
    with pytest.raises(ConfigError, match=message):
        order_of(**({"lengths": [3, 4]} | wrong))


def test_samples_that_are_none():
    order = order_of([3, 4])
    for sample in (-1, len(order)):
        with pytest.raises(IndexError, match=f"sample {sample} of 1"):
            order.parts(sample)
