"""How long until the first batch of a run that goes on in the middle of a very large corpus? Part of `bench order`.

The store has ten million documents and a thousand million samples; its index is real, its tokens are a hole in a sparse
file, since nobody has the room and no token decides anything. Timed: PackedTokens(order="elastic") as a checkpoint
leaves it, to the arrays of the first batch: opening both files, finding the sample, reading and packing it.

Isolates: a resumed start without the interpreter's. Held fixed: one process, the index in the page cache. How it can
mislead: on a cold disk the two dozen index entries cost one read each, and so does the row; a feeder process and its
imports come on top, whatever the order.
"""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import HeadraceError
from headrace.feed.packed_tokens import PackedTokens
from headrace.measure.statistics import median, p99
from headrace.store import TokenStore
from headrace.store.format import BOUNDARY, LENGTH, POINTER, IndexHeader, index_path, tokens_path

SEQUENCE_LENGTH = 512
SAMPLES_PER_DOCUMENT = 100


def first_batches(*, num_documents: int, num_rounds: int, seed: int, clock: Callable[[], int]) -> dict[str, Any]:
    """`rows` as those of `bench order`, and a `summary`: the median start, and the most that one start allocates.

    `walking` beside it: opening the same store as every other order does, with its whole index checked. Without
    documents nothing is measured, and the summary is None.
    """
    if num_documents == 0:
        return {"rows": [], "summary": {"elastic_first_batch_ms": None, "elastic_allocated_bytes": None}}
    num_samples = num_documents * SAMPLES_PER_DOCUMENT
    consumed = num_samples // 10
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        prefix = str(Path(folder) / "hole")
        write_hole(prefix, num_documents=num_documents, seed=seed)
        source = PackedTokens(prefix, seq_length=SEQUENCE_LENGTH, order="elastic", seed=seed, num_samples=num_samples)

        def resume() -> None:
            batches = source.open_batches(consumed_samples=consumed)
            try:
                if batches[0]["tokens"].shape != (1, SEQUENCE_LENGTH):
                    raise HeadraceError("the first batch is not what was asked for; its time means nothing")
            finally:
                batches.close()

        def walk() -> None:
            TokenStore(prefix).close()

        tracemalloc.start()
        try:
            resume()
            allocated_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        values = {"headrace": _timed(resume, num_rounds, clock), "walking": _timed(walk, min(3, num_rounds), clock)}
    rows = [
        {
            "what": f"first batch at {consumed:.0e} of {num_samples:.0e}",
            "contender": name,
            "sequence_length": SEQUENCE_LENGTH,
            "num_documents": num_documents,
            "num_samples": num_samples,
            "documents_per_sample": 1 / SAMPLES_PER_DOCUMENT,
            "median_us": median(values_us),
            "p99_us": p99(values_us),
            "values_us": values_us,
            "warmup_us": [],
        }
        for name, values_us in values.items()
    ]
    first_batch_us = median(values["headrace"])
    assert first_batch_us is not None, "num_rounds is at least 1"
    return {
        "rows": rows,
        "summary": {"elastic_first_batch_ms": first_batch_us / 1e3, "elastic_allocated_bytes": allocated_bytes},
    }


def write_hole(prefix: str, *, num_documents: int, seed: int) -> None:
    """A uint16 store with an index of `num_documents` lengths around 100 samples each, and tokens that are all 0."""
    mean = SAMPLES_PER_DOCUMENT * SEQUENCE_LENGTH
    # A little more than the mean, so that there are never too few samples.
    drawn = np.random.default_rng(seed).integers(mean // 2, mean * 3 // 2, num_documents)
    lengths = (drawn + mean // 20 + SEQUENCE_LENGTH).astype(LENGTH)
    dtype = np.dtype("<u2")
    ends = np.cumsum(lengths, dtype=POINTER) * dtype.itemsize
    header = IndexHeader(dtype=dtype, num_sequences=num_documents, num_boundaries=num_documents + 1)
    with open(index_path(prefix), "xb") as stream:
        stream.write(header.encode())
        stream.write(lengths.data)
        stream.write(np.concatenate([np.zeros(1, POINTER), ends[:-1]]).data)
        stream.write(np.arange(num_documents + 1, dtype=BOUNDARY).data)
    with open(tokens_path(prefix), "xb") as stream:
        os.truncate(stream.fileno(), int(ends[-1]))


def _timed(call: Callable[[], None], num_rounds: int, clock: Callable[[], int]) -> list[float]:
    values_us = []
    for _ in range(num_rounds):
        start = clock()
        call()
        values_us.append((clock() - start) / 1e3)
    return values_us
