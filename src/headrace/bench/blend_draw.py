"""How long until it is known which corpus gives which sample of a blend? Part of `bench order`.

Corpora with lognormal weights, drawn as BlendedDataset does it: megatron-core's C++ helper (build_blending_indices)
beside Drawing. Both fill new arrays of 10 bytes per sample, so the pages of those are part of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.order.draw import Drawing
from headrace.order.plan import IntArray
from headrace.order.split import normalize

NUM_CORPORA = 20
WEIGHT_SIGMA = 1.0


def drawers(num_samples: int, *, seed: int, helpers: Any | None) -> dict[str, Callable[[], tuple[IntArray, ...]]]:
    """By name what draws `num_samples` samples; `helpers`: megatron.core.datasets.helpers, None where it is missing."""
    weights = normalize(np.random.default_rng(seed).lognormal(0.0, WEIGHT_SIGMA, NUM_CORPORA).tolist())
    drawing = Drawing(weights=weights, size=num_samples)
    if helpers is None:
        return {"headrace": drawing.draw}

    def helper() -> tuple[IntArray, ...]:
        corpus_index, corpus_sample_index = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
        helpers.build_blending_indices(corpus_index, corpus_sample_index, weights, NUM_CORPORA, num_samples, False)
        return corpus_index, corpus_sample_index

    return {"headrace": drawing.draw, "megatron": helper}
