"""The passes of native/order.c: equal to their models, inside their outputs, without the GIL, for what fits only."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _native
from headrace.order.draw import Drawing
from headrace.order.sample_index import build_sample_index
from tests.another_thread import runs_beside

from . import model

whole_weights = st.lists(st.integers(1, 12), min_size=1, max_size=9)
GUARD = -7


def test_the_worked_example() -> None:
    index = Drawing(weights=[0.6, 0.4], size=5).draw()
    assert index.corpus_index.tolist() == [0, 1, 0, 1, 0]
    assert index.corpus_sample_index.tolist() == [0, 0, 1, 1, 2]


@given(whole_weights, st.integers(0, 300))
def test_a_drawing_by_weight_equals_the_model(weights: list[int], size: int) -> None:
    """Small weights: equals are many, and the first of them must win."""
    shares = [weight / sum(weights) for weight in weights]
    index = Drawing(weights=shares, size=size).draw()
    assert list(zip(*map(np.ndarray.tolist, index), strict=True)) == model.draw(shares, [size] * len(shares), size)


@given(whole_weights)
def test_an_exhaustive_drawing_equals_the_model(sizes: list[int]) -> None:
    shares = [size / float(sum(sizes)) for size in sizes]
    index = Drawing(weights=sizes, size=None).draw()
    assert list(zip(*map(np.ndarray.tolist, index), strict=True)) == model.draw(shares, sizes, sum(sizes))


@given(whole_weights, st.data())
def test_a_corpus_gives_no_more_than_its_limit(weights: list[int], data: st.DataObject) -> None:
    limits = [data.draw(st.integers(0, 9)) for _ in weights]
    size = data.draw(st.integers(0, sum(limits)))
    shares = [weight / sum(weights) for weight in weights]
    corpus_index, numbers = np.empty(size, np.int16), np.empty(size, np.int64)
    _native.draw_blend(np.array(shares), np.array(limits), corpus_index, numbers)
    drawn = list(zip(corpus_index.tolist(), numbers.tolist(), strict=True))
    assert drawn == model.draw(shares, limits, size)


def guarded(shape: tuple[int, ...], dtype: type) -> tuple[np.ndarray, Callable[[], bool]]:
    """An array between two guard zones, and whether both are as they were."""
    size = int(np.prod(shape))
    memory = np.full(size + 32, GUARD, dtype)
    return memory[16 : 16 + size].reshape(shape), lambda: bool(
        (memory[:16] == GUARD).all() and (memory[16 + size :] == GUARD).all()
    )


@given(
    st.lists(st.sampled_from([0, 0, 1, 2, 3, 7, 40]), min_size=1, max_size=25).filter(any),
    st.integers(1, 30),
    st.integers(0, 1),
    st.integers(0, 60),
    st.booleans(),
    st.integers(1, 3),
)
@settings(max_examples=500)
def test_a_sample_index_equals_the_model(
    lengths: list[int], sequence_length: int, extra: int, num_samples: int, wide: bool, every: int
) -> None:
    """Also rows behind the last token, documents that come with a stride, and rows of int64."""
    strided = np.full((len(lengths), every), GUARD, np.int32)
    strided[:, 0] = lengths
    index, unharmed = guarded((num_samples + 1, 2), np.int64 if wide else np.int32)
    _native.index_samples(strided[:, 0], index, sequence_length, extra)
    expected = model.sample_index(strided[:, 0], sequence_length, extra, num_samples)
    assert index.tolist() == [list(start) for start in expected]
    assert unharmed()
    ours = build_sample_index(strided[:, 0], sequence_length=sequence_length, num_samples=num_samples, extra=extra)
    assert ours.dtype == np.int32
    assert np.array_equal(ours, index)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=25), st.integers(1, 2**31 - 1))
def test_lengths_that_cannot_be_write_nothing_outside(lengths: list[int], sequence_length: int) -> None:
    index, unharmed = guarded((8, 2), np.int32)
    _native.index_samples(np.array(lengths, np.int32), index, sequence_length, 1)
    assert unharmed()


def test_a_drawing_writes_nothing_outside() -> None:
    outputs = guarded((100,), np.int16), guarded((100,), np.int64)
    _native.draw_blend(np.array([0.25, 0.5, 0.25]), np.array([100, 40, 50]), *(array for array, _ in outputs))
    assert all(unharmed() for _, unharmed in outputs)
    assert np.bincount(outputs[0][0]).tolist() == [30, 40, 30]


SHARES, LIMITS, CORPORA, NUMBERS = np.array([0.5, 0.5]), np.array([3, 3]), np.empty(6, np.int16), np.empty(6, np.int64)
LENGTHS, INDEX = np.array([3, 2, 4], np.int32), np.empty((3, 2), np.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SHARES.astype(np.float32), LIMITS, CORPORA, NUMBERS), r"shares must be float64 \[corpora\], got .*'f', 4"),
        ((SHARES.tolist(), LIMITS, CORPORA, NUMBERS), "shares must be float64.*got <class 'list'>"),
        ((SHARES[::-1], LIMITS, CORPORA, NUMBERS), "shares must be float64"),
        ((SHARES, LIMITS.astype(np.int32), CORPORA, NUMBERS), "limits must be int64.*'i', 4 bytes, 1 dimensions"),
        ((SHARES, LIMITS, CORPORA.astype(np.int32), NUMBERS), "corpus_index must be writable int16"),
        ((SHARES, LIMITS, CORPORA, bytes(48)), "corpus_sample_index must be writable int64.*got <class 'bytes'>"),
        ((SHARES, LIMITS, CORPORA, NUMBERS.reshape(2, 3)), "2 dimensions"),
        ((SHARES, LIMITS, CORPORA, NUMBERS[:5]), "outputs of 6 and 5 samples"),
        ((SHARES[:1], LIMITS, CORPORA, NUMBERS), "got 1 shares, 2 limits"),
        ((SHARES[:0], LIMITS[:0], CORPORA, NUMBERS), "got 0 shares, 0 limits"),
        ((np.zeros(32768), np.full(32768, 1), CORPORA, NUMBERS), "of 1 to 32767 corpora.*got 32768 shares"),
        ((SHARES, LIMITS - 1, CORPORA, NUMBERS), "limits of .* that suffice"),
        ((SHARES, LIMITS * [-1, 2], CORPORA, NUMBERS), "limits of"),
        ((SHARES * np.nan, LIMITS, CORPORA, NUMBERS), r"shares in \[0, 1\]"),
        ((SHARES * 3, LIMITS, CORPORA, NUMBERS), r"shares in \[0, 1\]"),
        ((-SHARES, LIMITS, CORPORA, NUMBERS), r"shares in \[0, 1\]"),
    ],
)
def test_drawings_that_do_not_fit(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.draw_blend(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LENGTHS.astype(np.int64), INDEX, 4, 1), r"lengths must be int32 \[documents\], got .*'l', 8"),
        ((LENGTHS.astype(np.uint32), INDEX, 4, 1), "lengths must be int32"),
        ((LENGTHS[None], INDEX, 4, 1), "2 dimensions"),
        ((LENGTHS[:0], INDEX, 4, 1), "got 0 documents"),
        ((LENGTHS, INDEX.astype(np.int16), 4, 1), "sample_index must be writable int32 or int64"),
        ((LENGTHS, INDEX.astype(np.float32), 4, 1), "sample_index must be writable int32 or int64"),
        ((LENGTHS, INDEX.T, 4, 1), "sample_index must be"),
        ((LENGTHS, INDEX[:0], 4, 1), r"got 3 documents, \[0, 2\]"),
        ((LENGTHS, np.empty((3, 3), np.int32), 4, 1), r"\[3, 3\]"),
        ((LENGTHS, INDEX, 0, 1), r"sequence_length 1 to 2147483647 .*, 0 and 1"),
        ((LENGTHS, INDEX, 2**31, 1), "2147483648 and 1"),
        ((LENGTHS, INDEX, 4, 2), "extra 0 or 1, got .*, 4 and 2"),
    ],
)
def test_sample_indices_that_do_not_fit(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.index_samples(*arguments)


@pytest.mark.parametrize("what", ["draw_blend", "index_samples"])
def test_another_thread_runs_meanwhile(what: str) -> None:
    calls = {
        "draw_blend": Drawing(weights=[0.5, 0.5], size=100_000).draw,
        "index_samples": lambda: build_sample_index(
            np.full(100_000, 9, np.int32), sequence_length=9, num_samples=99_000, extra=1
        ),
    }
    assert runs_beside(calls[what], most_calls=5_000)


def test_lengths_of_an_array_without_strides() -> None:
    """ctypes exports none where NumPy does."""
    lengths = [5, 6, 9]
    index, expected = np.zeros((5, 2), np.int32), np.zeros((5, 2), np.int32)
    _native.index_samples((ctypes.c_int32 * 3)(*lengths), index, 4, 1)
    _native.index_samples(np.array(lengths, np.int32), expected, 4, 1)
    assert index.tolist() == expected.tolist()
