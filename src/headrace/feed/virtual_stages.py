"""Virtual pipeline stages: a process that holds several chunks of layers takes every micro batch once per chunk.

    first, second = virtual_stages(feed, stages_of(pp_rank, pp_size, virtual_size=2))

The ring delivers once; what one chunk has taken is kept for the others. An interleaved schedule lets the first chunk
run ahead of the last by `pp_size * (virtual_size - 1)` micro batches or a few more: that many must stay valid, so
`hold` is the lead plus one, or the feed hands out copies (`owned=True`). A chunk that comes too late gets FeedClosed,
which says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic

from headrace.feed.batch import Array, Batch
from headrace.packing import Schedule, Stage, is_needed, keys_of_stages


def virtual_stages(
    feed: Iterator[Batch[Array]], stages: Sequence[Stage], *, schedule: Schedule = "1f1b"
) -> tuple[Iterator[Batch[Array]], ...]:
    """One iterator per stage over the same batches, each with the fields of its stage; all end with the feed.

    The feed's own view names all of these stages (`View(stage=stages)`). Used by one thread.
    """
    kept: _Kept[Array] = _Kept(feed, len(stages))
    return tuple(
        _of_chunk(kept, chunk, keys_of_stages((stage,), schedule=schedule)) for chunk, stage in enumerate(stages)
    )


class _Kept(Generic[Array]):
    """Batches that some chunk has not taken yet."""

    def __init__(self, feed: Iterator[Batch[Array]], num_chunks: int) -> None:
        self._feed = feed
        self._batches: deque[Batch[Array]] = deque()
        self._num_dropped = 0
        self._num_taken = [0] * num_chunks

    def take(self, chunk: int) -> Batch[Array] | None:
        """The chunk's next batch; None at the end of the data."""
        place = self._num_taken[chunk] - self._num_dropped
        if place == len(self._batches):
            batch = next(self._feed, None)
            if batch is None:
                return None
            self._batches.append(batch)
        batch = self._batches[place]
        self._num_taken[chunk] += 1
        if min(self._num_taken) > self._num_dropped:
            self._batches.popleft()
            self._num_dropped += 1
        return batch


def _of_chunk(kept: _Kept[Array], chunk: int, keys: frozenset[str]) -> Iterator[Batch[Array]]:
    while (batch := kept.take(chunk)) is not None:
        yield batch.with_fields([name for name in batch if is_needed(name, keys)])
