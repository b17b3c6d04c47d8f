"""Sources that tests feed from. Each is called with a SourceContext, in the feeder or, for an iterator, in a rank."""

from __future__ import annotations

import math
import os
import random
import resource
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headrace.feed import SourceContext

Item = Mapping[str, Any]


def numbers(context: SourceContext, *, num_batches: int = 5, rows: int = 2) -> Iterator[Item]:
    """Batch i of shard r: rows of [r, i, seed]."""
    for index in range(num_batches):
        row = [context.data_rank, index, context.seed]
        yield {"numbers": np.array([row] * rows, np.int64), "name": f"batch {index}"}


class Resumable:
    """`numbers` with a state of its own, and a cost: it counts how many batches it has drawn since it was made."""

    def __init__(self, context: SourceContext, num_batches: int = 6) -> None:
        self._context, self._num_batches, self._next = context, num_batches, 0
        self._drawn = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]

    def __iter__(self) -> Iterator[Item]:
        while self._next < self._num_batches:
            self._next += 1
            self._drawn += 1
            yield {"numbers": np.array([[self._context.data_rank, self._next - 1, self._drawn]])}


def resumable(context: SourceContext, *, num_batches: int = 6) -> Resumable:
    return Resumable(context, num_batches)


DTYPES = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip


def every_dtype(context: SourceContext) -> Iterator[Item]:
    for index in range(3):
        yield {dtype: np.arange(index, index + 3).astype(dtype) for dtype in DTYPES}


def shapes(context: SourceContext) -> Iterator[Item]:
    """Ragged, scalar, without elements, with many dimensions, not contiguous; another shape in every batch."""
    for index in range(4):
        grid = np.arange(24, dtype=np.int32).reshape(2, 3, 4) + index
        yield {
            "ragged": np.arange(index * 3, dtype=np.int64),
            "scalar": np.float32(index / 2),
            "empty": np.empty((index, 0, 2), np.uint8),
            "six": np.full((1, 2, 1, 2, 1, index + 1), index, np.int16),
            "transposed": grid.transpose(2, 0, 1),
            "big_endian": np.arange(index + 1, dtype=">i4"),
        }


EXTRA = {
    "text": "ünïcode", "count": 3, "share": 0.25, "flag": True, "nothing": None, "names": ["a", "b"],
    "nested": {"deep": [1, {"deeper": None}]}, "raw": b"\x00\xff",
}  # fmt: skip


def with_extra(context: SourceContext) -> Iterator[Item]:
    for index in range(3):
        yield {"x": np.array([index]), **EXTRA, "index": index, "not_a_number": math.nan}


def growing(context: SourceContext, *, sizes: tuple[int, ...] = (10, 200_000, 20, 900_000, 900_001)) -> Iterator[Item]:
    """Batches that outgrow the slots made for the first one; and metadata that do."""
    for index, size in enumerate(sizes):
        yield {"x": np.full(size, index, np.int32), "note": "n" * (size // 4)}


def boundaries(context: SourceContext) -> Iterator[Item]:
    yield {"tokens": np.arange(8), "cu_seqlens": np.array([0, 3, 8], np.int32)}
    yield {"tokens": np.arange(8), "cu_seqlens": np.array([0, 8], np.int32)}


def boundaries_of_transformers(context: SourceContext) -> Iterator[Item]:
    yield {"input_ids": np.arange(8), "cu_seq_lens_q": np.array([0, 3, 8], np.uint32)}


def boundaries_of_rows(context: SourceContext) -> Iterator[Item]:
    """A form of their own: nobody here knows what they say."""
    yield {"tokens": np.arange(8), "cu_seqlens": np.array([[0, 3, 8, -1], [0, 8, -1, -1]], np.int32)}


def raising(context: SourceContext, *, after: int, kind: str = "ValueError") -> Iterator[Item]:
    yield from numbers(context, num_batches=after)
    raise {"ValueError": ValueError, "SystemExit": SystemExit}[kind]("the disk is on fire")


class NotWhatItSays(Exception):
    """Cannot be pickled, and has no text."""

    def __init__(self, a: int, b: int) -> None:
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no words")


def raising_oddly(context: SourceContext) -> Iterator[Item]:
    yield from numbers(context, num_batches=1)
    raise NotWhatItSays(1, 2)


def raising_at_once(context: SourceContext) -> Iterator[Item]:
    raise FileNotFoundError(2, "No such file", "corpus.bin")


BAD_BATCHES: dict[str, tuple[Any, str]] = {
    "a list": ([1, 2], "batch 1 of the source is a list; a source yields dicts of arrays"),
    "none": (None, "batch 1 of the source is a NoneType"),
    "no array": ({"text": "only"}, "batch 1 of the source holds no array, only ['text']"),
    "an object": ({"x": object()}, "field 'x' of batch 1 has dtype object: objects cannot be shared"),
    "strings": ({"x": np.array(["a"], object)}, "field 'x' of batch 1 has dtype object"),
    "not json": ({"x": np.arange(2), "y": [object()]}, "batch 1 has keys that are neither arrays nor JSON"),
    "arrays in a list": ({"x": np.arange(2), "y": [np.arange(2)]}, "batch 1 has keys that are neither arrays nor JSON"),
    "a large int": ({"x": np.arange(2), "y": 2**70}, "batch 1 has keys that are neither arrays nor JSON"),
    "a number as key": ({"x": np.arange(2), 7: np.arange(2)}, "has the key 7; keys are strings"),
    "another dtype": ({"x": np.arange(2, dtype=np.int32)}, "field 'x' was int64 in the first batch and is int32"),
    "another name": ({"y": np.arange(2)}, "field 'x' was int64 in the first batch and is absent in batch 1"),
    "one more": ({"x": np.arange(2), "y": np.arange(2)}, "field 'y' was absent in the first batch and is int64"),
    "a structured field": ({"x": np.zeros(2, [("a", "i4")])}, "split a structured field into plain ones"),
    "a masked array": (
        {"x": np.ma.masked_array(np.arange(2), [True, False])},
        "field 'x' of batch 1 is a masked array",
    ),
    "seven dimensions": ({"x": np.zeros((1,) * 7, np.int64)}, "field 'x' has 7 dimensions, at most 6 fit"),
}


def bad_batch(context: SourceContext, *, name: str) -> Iterator[Any]:
    yield {"x": np.arange(2)}
    yield BAD_BATCHES[name][0]


def many_fields(context: SourceContext) -> Iterator[Item]:
    yield {f"field {i}": np.arange(2) for i in range(33)}


def no_iterable(context: SourceContext) -> int:
    return 5


def nothing(context: SourceContext) -> Iterator[Item]:
    return iter(())


def drawing(context: SourceContext) -> Iterator[Item]:
    """A collate that draws random numbers without a seed."""
    for _ in range(4):
        yield {"noise": np.random.random(3), "pick": np.array([random.getrandbits(60)])}


def pid_of_reader(context: SourceContext, *, num_batches: int = 1000) -> Iterator[Item]:
    """Who reads the source?"""
    for _ in range(num_batches):
        yield {"pid": np.array([os.getpid()])}


def waiting_for_ever(context: SourceContext, *, after: int, trace: str) -> Iterator[Item]:
    """A queue that nobody fills any more; says in the file `trace` whether its clean-up ran."""
    try:
        yield from numbers(context, num_batches=after)
        signal.pause()
    finally:
        Path(trace).write_text("cleaned up")


def gated(context: SourceContext, *, gate: str, num_ranks: int) -> Iterator[Item]:
    """Does not yield before the files `gate`0, `gate`1, ... exist."""
    while not all(Path(f"{gate}{rank}").exists() for rank in range(num_ranks)):
        os.sched_yield()
    yield from numbers(context)


def large(context: SourceContext, *, num_bytes: int, after: int = 1) -> Iterator[Item]:
    yield from ({"x": np.zeros(8, np.uint8)} for _ in range(after))
    yield {"x": np.zeros(num_bytes, np.uint8)}


def large_without_address_space(
    context: SourceContext, *, num_bytes: int, spare_bytes: int, after: int = 3
) -> Iterator[Item]:
    """A batch that outgrows the slots, in a process that may map only `spare_bytes` more by then."""
    too_large = np.zeros(num_bytes, np.uint8)
    yield from ({"x": np.zeros(8, np.uint8)} for _ in range(after))
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + spare_bytes, most))
    try:
        yield {"x": too_large}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def with_file(context: SourceContext, *, path: str) -> Iterator[Item]:
    with open(path) as file:
        for line in file:
            yield {"line": np.array([int(line)])}


def number_of_host(context: SourceContext, *, num_batches: int) -> Iterator[Item]:
    """Other data on every host: a corpus that was copied before it was finished."""
    for index in range(num_batches):
        yield {"tokens": np.array([index, ord(os.environ["HEADRACE_HOST"])])}
