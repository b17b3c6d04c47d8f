"""A source that lets its readers wait: what an idle rank costs is measured meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headrace.feed import SourceContext


@dataclass(frozen=True, slots=True)
class PausingSource:
    """One batch at once, the next one `pause_s` later."""

    pause_s: float

    def __call__(self, context: SourceContext) -> Iterator[dict[str, np.ndarray]]:
        yield {"tokens": np.zeros(16, np.int64)}
        time.sleep(self.pause_s)
        yield {"tokens": np.zeros(16, np.int64)}
