"""A source in a module without torch, which the feeder would have to import with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.feed import SourceContext


class Counting:
    """`num_batches` batches of growing size: the slots grow on the way, as the ring's do."""

    def __init__(self, num_batches: int, *, fails_at: int | None = None) -> None:
        self.num_batches, self.fails_at = num_batches, fails_at

    def __call__(self, context: SourceContext) -> Iterator[dict[str, Any]]:
        for index in range(self.num_batches):
            if index == self.fails_at:
                raise RuntimeError("the disk is on fire")
            width = 8 if index < self.num_batches // 2 else 8192
            yield {"tokens": np.full((2, width), index), "weights": np.full(3, index / 2, np.float32)}


def packed(context: SourceContext) -> Iterator[dict[str, Any]]:
    """Two batches of packed documents."""
    for boundaries in ([0, 8, 16], [0, 3, 5, 16]):
        yield {"tokens": np.zeros((1, 16), np.int64), "cu_seqlens": np.array(boundaries, np.int32)}
