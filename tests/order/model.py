"""The passes of native/order.h said slowly: what a blend draws, and where samples start."""

from collections.abc import Sequence

import numpy as np


def draw(shares: Sequence[float], limits: Sequence[int], num_samples: int) -> list[tuple[int, int]]:
    """Corpus and number there of each sample: of those below their limit the furthest behind, the first of equals."""
    drawn, choices = [0] * len(shares), []
    for sample in range(num_samples):
        behind = {
            corpus: share * float(max(sample, 1)) - float(drawn[corpus])
            for corpus, share in enumerate(shares)
            if drawn[corpus] < limits[corpus]
        }
        furthest = max(behind, key=behind.__getitem__)
        choices.append((furthest, drawn[furthest]))
        drawn[furthest] += 1
    return choices


def sample_index(lengths: np.ndarray, sequence_length: int, extra: int, num_samples: int) -> list[tuple[int, int]]:
    """Start of each sample, and of the one after the last, looked up token by token."""
    places = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.concatenate([np.arange(length) for length in lengths])
    starts = [(0, 0)]
    for row in range(1, num_samples + 1):
        settling = row * sequence_length + extra - 1
        at = min(settling, len(places) - 1)
        starts.append((int(places[at]), int(offsets[at]) + 1 - extra))
    return starts
