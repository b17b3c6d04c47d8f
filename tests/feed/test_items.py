"""Batches that somebody else made: what is taken, what is refused, and from where it goes on. Without a process."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headrace.errors import ConfigError
from headrace.feed import SourceContext
from headrace.feed.items import ItemProduction
from headrace.feed.production import Written
from headrace.spec import BatchSpec
from tests.feed import sources

CONTEXT = SourceContext(data_rank=0, data_size=1, seed=1)


def production(items: Iterable[Any], num_shards: int = 1) -> ItemProduction:
    return ItemProduction(items, num_shards=num_shards)


def written(one: ItemProduction, spec: BatchSpec) -> tuple[dict[str, np.ndarray], Written]:
    slot = {field.name: np.empty(field.shape, field.dtype) for field in spec.fields}
    return slot, one.write(slot)


@pytest.mark.parametrize("name", sources.BAD_BATCHES)
def test_what_cannot_be_shared_is_refused_by_name(name: str) -> None:
    one = production(sources.bad_batch(CONTEXT, name=name))
    assert one.advance() is not None
    with pytest.raises(ConfigError) as caught:
        one.advance()
    assert sources.BAD_BATCHES[name][1] in str(caught.value)


def test_a_long_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="a field name has 1 to 40 bytes"):
        production([{"x" * 41: np.arange(2)}]).advance()


@pytest.mark.parametrize("name", ["\0", "a\0", "a\0b", "\ud800"])
def test_a_name_that_a_slot_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a field name is text without NUL characters, got"):
        production([{name: np.arange(2)}]).advance()


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=10),
        arrays.arrays(arrays.boolean_dtypes() | arrays.integer_dtypes() | arrays.floating_dtypes(sizes=(16, 32, 64)),
                      arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)),
        min_size=1,
        max_size=6,
    )
)  # fmt: skip
def test_arrays_of_any_kind_arrive_as_they_are(item: dict[str, np.ndarray]) -> None:
    one = production([item])
    spec = one.advance()
    assert spec is not None
    slot, _ = written(one, spec)
    for name, array in item.items():
        assert slot[name].shape == array.shape
        np.testing.assert_array_equal(slot[name], array)
    assert one.advance() is None


@given(st.dictionaries(
    st.text(max_size=10),
    st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
                 lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)),
    max_size=4,
))  # fmt: skip
def test_everything_else_arrives_as_it_is(extra: dict[str, Any]) -> None:
    one = production([{**extra, "array of more than ten letters": np.arange(1)}])
    spec = one.advance()
    assert spec is not None
    _, result = written(one, spec)
    assert repr(result.metadata.extra) == repr(extra)


def test_samples_are_counted_over_all_shards() -> None:
    one = production(sources.numbers(CONTEXT, num_batches=3, rows=4), num_shards=5)
    counts = []
    while (spec := one.advance()) is not None:
        counts.append(written(one, spec)[1].consumed_samples)
    assert counts == [20, 40, 60]


def test_a_batch_may_be_written_twice() -> None:
    """The slots grow between the two."""
    one = production(sources.numbers(CONTEXT))
    spec = one.advance()
    assert spec is not None
    (first, told), (second, told_again) = written(one, spec), written(one, spec)
    assert told == told_again
    np.testing.assert_array_equal(first["numbers"], second["numbers"])


@pytest.mark.parametrize(("item", "longest", "documents"), [
    ({"cu_seqlens": np.array([0, 3, 8], np.int32)}, 5, 2),
    ({"cu_seqlens": np.array([0, 3, 8], np.uint32)}, 5, 2),
    ({"cu_seqlens": np.array([0, 2, 2, 3])}, 2, 3),
    ({"cu_seqlens": np.array([5, 3], np.uint16)}, 0, 1),
    ({"cu_seqlens": np.array([[0, 8]])}, 0, 0),
    ({"cu_seqlens": np.array([], np.int32)}, 0, 0),
    ({"cu_seqlens": np.int32(4)}, 0, 0),
    ({"cu_seqlens": np.array([0.0, 3.0, 8.0])}, 0, 0),
    ({"cu_seqlens": np.array([0.0, np.nan])}, 0, 0),
    ({"cu_seqlens": np.array([0, 3j])}, 0, 0),
    ({"tokens": np.arange(4)}, 0, 0),
])  # fmt: skip
def test_boundaries_are_measured(item: dict[str, Any], longest: int, documents: int) -> None:
    one = production([item])
    spec = one.advance()
    assert spec is not None
    with warnings.catch_warnings(action="error"):
        _, result = written(one, spec)
    assert (result.max_seqlen, result.num_documents) == (longest, documents)


class Loader:
    """An iterable that minds when it is asked what, as stateful data loaders do: beginning restarts it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.position = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.calls.append("iter")
        return self

    def __next__(self) -> dict[str, Any]:
        self.position += 1
        return {"x": np.array([self.position])}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls.append("load")
        self.position = state["position"]


def test_a_loader_is_not_begun_before_its_state_is_loaded() -> None:
    loader = Loader()
    one = production(loader)
    one.resume(source_state={"position": 7}, num_drawn=3, consumed_samples=10)
    spec = one.advance()
    assert spec is not None
    slot, result = written(one, spec)
    assert loader.calls == ["load", "iter"]
    assert slot["x"].tolist() == [8]
    assert result.consumed_samples == 11
    assert pickle.loads(result.metadata.source_state or b"") == {"position": 8}


def test_without_a_state_what_was_consumed_is_drawn_and_dropped() -> None:
    one = production(sources.numbers(CONTEXT))
    one.resume(source_state=None, num_drawn=3, consumed_samples=6)
    spec = one.advance()
    assert spec is not None
    slot, result = written(one, spec)
    assert (slot["numbers"][0, 1], result.consumed_samples) == (3, 8)


@pytest.mark.parametrize("num_drawn", [0, 2])
def test_closing_runs_a_generators_clean_up(num_drawn: int) -> None:
    ended = []

    def lines() -> Iterator[dict[str, Any]]:
        try:
            yield from sources.numbers(CONTEXT)
        finally:
            ended.append(True)

    generator = lines()
    one = production(generator)
    one.resume(source_state=None, num_drawn=num_drawn, consumed_samples=0)
    one.advance()
    one.close()
    assert ended == [True]
