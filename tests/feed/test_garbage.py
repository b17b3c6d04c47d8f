"""Garbage is collected whenever Python allocates, also inside next(feed); a finalizer may close that very feed then."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: a pointer kept too long ends it by a signal, at once under the allocator's own checks.
CLOSED_INSIDE_NEXT = """
import gc, itertools, sys
import numpy as np
from headrace.errors import FeedClosed
from headrace.feed import Feed, FeedConfig

def source(context):
    for number in itertools.count():
        yield {"tokens": np.full((1, 64), number, np.int64)}

class Owner:
    def __init__(self, feed):
        self.feed, self.me = feed, self

    def __del__(self):
        self.feed.close()

outcomes = set()
for owned in (False, True):
    for num_allocations in (1, 2, 3, 4):
        feed = Feed(source, config=FeedConfig(owned=owned))
        for _ in range(8):
            next(feed)
        gc.collect()
        gc.disable()
        # No tuple of these lengths is at hand any more: the next is allocated.
        kept = [[tuple([i] * length) for i in range(2500)] for length in (6, 8)]
        Owner(feed)
        gc.set_threshold(gc.get_count()[0] + num_allocations)
        gc.enable()
        try:
            batch = next(feed)
            outcomes.add((owned, "batch"))
            assert owned is False or batch["tokens"].tolist() == [[8] * 64]
        except FeedClosed:
            outcomes.add((owned, "closed"))
        gc.set_threshold(700)
        del kept
        feed.close()
print(sorted(outcomes))
"""


def test_a_feed_closed_by_a_finalizer_inside_next_is_closed_and_nothing_worse() -> None:
    command = [sys.executable, "-X", "dev", "-c", CLOSED_INSIDE_NEXT]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert "(False, 'closed')" in ran.stdout, "or the collections came at other moments"
    assert "(True, 'closed')" in ran.stdout
