"""Which corpus each sample of a blend comes from: Megatron's two helpers, and the proof that an answer is theirs.

Sample i goes to the corpus that is furthest behind its share, argmax(weight * max(i, 1) - samples drawn so far), the
first of equals. The same comparisons in double precision as build_blending_indices and
build_exhaustive_blending_indices in megatron/core/datasets/helpers.cpp (0.16.1), built for x86-64; a build that fuses
the multiplication with the subtraction, as compilers do for aarch64, may decide between equals differently.

Each choice depends on all before it, so drawing is a loop: about 0.5 + 0.05 * corpora microseconds per sample. Checking
a finished sequence is not, and much faster: given the choices before it, each choice can be checked by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Samples checked at once: [corpora, 4096] doubles stay in the cache for usual numbers of corpora.
_BLOCK = 4096

Choices = npt.NDArray[np.int16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """What decides the choices of a blend."""

    weights: list[float] | list[int]
    """With a size: shares that add up to 1. Without: numbers of samples."""
    size: int | None
    """Samples to draw. None: exactly as many from each corpus as `weights` says."""

    def choices(self) -> Choices:
        """Which corpus each sample comes from. int16 [num_samples]."""
        if self.size is None:
            return exhaust([int(weight) for weight in self.weights])
        return draw(self.weights, self.size)

    def gives(self, choices: Choices) -> bool:
        """Whether `choices` is what this drawing gives."""
        size = sum(self.weights) if self.size is None else self.size
        if choices.dtype != np.int16 or choices.shape != (size,):
            return False
        weights = np.array(self.weights, np.float64)
        if self.size is None:
            return _follows(choices, weights / float(size), weights)
        return _follows(choices, weights, np.full(len(weights), np.inf))


def draw(weights: Sequence[float], num_samples: int) -> Choices:
    """Which corpus each of `num_samples` samples comes from; `weights` add up to 1. int16 [num_samples]."""
    choices = np.empty(num_samples, np.int16)
    drawn = [0.0] * len(weights)
    for sample in range(num_samples):
        position = float(sample or 1)
        behind = [weight * position - done for weight, done in zip(weights, drawn, strict=True)]
        furthest = behind.index(max(behind))
        choices[sample] = furthest
        drawn[furthest] += 1.0
    return choices


def exhaust(sizes: Sequence[int]) -> Choices:
    """Which corpus each sample comes from if exactly `sizes` samples are drawn from them. int16 [sum(sizes)].

    As `draw` with weights in proportion to the sizes; a corpus that is used up drops out.
    """
    total = sum(sizes)
    choices = np.empty(total, np.int16)
    drawn = [0.0] * len(sizes)
    left = [(corpus, size / float(total)) for corpus, size in enumerate(sizes)]
    for sample in range(total):
        position = float(sample or 1)
        behind = [weight * position - drawn[corpus] for corpus, weight in left]
        furthest = behind.index(max(behind))
        corpus = left[furthest][0]
        choices[sample] = corpus
        drawn[corpus] += 1.0
        if drawn[corpus] == sizes[corpus]:
            del left[furthest]
    return choices


def running_numbers(choices: Choices, num_corpora: int) -> npt.NDArray[np.int64]:
    """How many samples its corpus gave before each sample: Megatron's dataset_sample_index."""
    drawn = np.bincount(choices, minlength=num_corpora)
    firsts = np.cumsum(drawn) - drawn
    numbers = np.empty(len(choices), np.int64)
    numbers[np.argsort(choices, kind="stable")] = np.arange(len(choices)) - np.repeat(firsts, drawn)
    return numbers


def _follows(choices: Choices, weights: npt.NDArray[np.float64], limits: npt.NDArray[np.float64]) -> bool:
    """Whether each choice is right, given all before it. `limits`: where a corpus is used up."""
    corpora = np.arange(len(weights), dtype=np.int16)[:, np.newaxis]
    drawn = np.zeros((len(weights), 1))
    for first in range(0, len(choices), _BLOCK):
        block = choices[first : first + _BLOCK]
        picked = corpora == block
        before = np.cumsum(picked, axis=1, dtype=np.float64) - picked + drawn
        positions = np.maximum(np.arange(first, first + len(block), dtype=np.float64), 1.0)
        behind = weights[:, np.newaxis] * positions - before
        behind[before >= limits[:, np.newaxis]] = -np.inf
        if not np.array_equal(behind.argmax(axis=0), block):
            return False
        drawn += picked.sum(axis=1, keepdims=True)
    return True
