"""Samples drawn from several corpora in given proportions: Megatron's BlendedDataset.

Sample i goes to the corpus that is furthest behind its share, argmax(weight * max(i, 1) - samples drawn so far), the
first of equals; inside a corpus samples follow each other. The same comparisons in double precision as
build_blending_indices in megatron/core/datasets/helpers.cpp (0.16.1), built for x86-64; a build that fuses the
multiplication with the subtraction, as compilers do for aarch64, may decide between equals differently.

Each choice depends on all before it, so this is a loop: about 0.3 + 0.05 * corpora microseconds per sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.order.index_cache import IndexCache
from headrace.order.megatron import MegatronOrder
from headrace.order.plan import IntArray, OrderRules
from headrace.order.sample import Part, SampleOrder
from headrace.order.split import normalize

MAX_CORPORA = 32766
# Megatron's mid_level_dataset_surplus: rounding must not leave a corpus short of samples.
SURPLUS = 0.005


class BlendedOrder:
    """Samples of `orders`, interleaved. See SampleOrder for what it answers.

    `choices`: which order each sample comes from, int16 [num_samples]. Raises ConfigError if an order has fewer
    samples than are drawn from it, or the orders differ in `row_tokens`.
    """

    def __init__(self, orders: Sequence[SampleOrder], choices: npt.NDArray[np.int16]) -> None:
        if len({order.row_tokens for order in orders}) != 1:
            raise ConfigError(f"blended corpora must agree on tokens per row, got {[o.row_tokens for o in orders]}")
        self.orders = tuple(orders)
        self.corpus_index = choices
        """Which order each sample comes from: Megatron's dataset_index."""
        self.corpus_sample_index = np.empty(len(choices), np.int64)
        """Which sample of that order: Megatron's dataset_sample_index."""
        for corpus, order in enumerate(orders):
            places = np.flatnonzero(choices == corpus)
            if len(places) > len(order):
                raise ConfigError(
                    f"the blend draws {len(places)} samples from corpus {corpus}, which has {len(order)}; "
                    "raise `surplus`, or take a larger corpus"
                )
            self.corpus_sample_index[places] = np.arange(len(places))

    @property
    def row_tokens(self) -> int:
        """Tokens of a full sample."""
        return self.orders[0].row_tokens

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.corpus_index)

    def parts(self, sample: int) -> Sequence[Part]:
        """The parts of one sample, see SampleOrder; `corpus` says whose they are."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        return self.orders[int(self.corpus_index[sample])].parts(int(self.corpus_sample_index[sample]))


def blend_megatron(
    lengths_per_corpus: Sequence[IntArray],
    rules: OrderRules,
    *,
    weights: Sequence[float] | None = None,
    surplus: float = SURPLUS,
    caches: Sequence[IndexCache | None] | None = None,
) -> MegatronOrder | BlendedOrder:
    """What BlendedMegatronDatasetBuilder makes of several corpora; `rules.num_samples` counts samples of the blend.

    With weights, each corpus is repeated as often as its share needs, and there may be a few samples more than asked
    for. Without, each corpus is read once at most, in proportion to its samples. A single corpus without weights is
    not blended at all. `caches`: one per corpus. Raises ConfigError for weights that mean nothing.
    """
    caches = caches or [None] * len(lengths_per_corpus)
    if not 1 <= len(lengths_per_corpus) <= MAX_CORPORA:
        raise ConfigError(f"a blend has 1 to {MAX_CORPORA} corpora, got {len(lengths_per_corpus)}")
    if len(caches) != len(lengths_per_corpus):
        raise ConfigError(f"{len(lengths_per_corpus)} corpora need as many caches, got {len(caches)}")
    if weights is None:
        if len(lengths_per_corpus) == 1:
            return MegatronOrder(lengths_per_corpus[0], rules, cache=caches[0])
        wanted: Sequence[int | None] = [None] * len(lengths_per_corpus)
    else:
        shares = _shares(weights, len(lengths_per_corpus))
        if rules.num_samples is None:
            raise ConfigError("a blend with weights needs `num_samples`, the number of samples to draw")
        wanted = requested_per_corpus(shares, rules.num_samples, surplus=surplus)
    orders = [
        MegatronOrder(lengths, replace(rules, num_samples=number), corpus=corpus, cache=cache)
        for corpus, (lengths, number, cache) in enumerate(zip(lengths_per_corpus, wanted, caches, strict=True))
    ]
    if weights is None:
        sizes = [len(order) for order in orders]
        if rules.num_samples is None:
            return BlendedOrder(orders, exhaust(sizes))
        return BlendedOrder(orders, draw(normalize(sizes), min(rules.num_samples, sum(sizes))))
    # Megatron's builder normalizes, and BlendedDataset once more: the last bit may change.
    return BlendedOrder(orders, draw(normalize(shares), sum(requested_per_corpus(shares, rules.num_samples or 0))))


def requested_per_corpus(shares: Sequence[float], num_samples: int, *, surplus: float = 0.0) -> list[int]:
    """Samples to build per corpus: its share rounded up, plus `surplus`, rounded up again."""
    return [math.ceil(math.ceil(num_samples * share) * (1 + surplus)) for share in shares]


def draw(weights: Sequence[float], num_samples: int) -> npt.NDArray[np.int16]:
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


def exhaust(sizes: Sequence[int]) -> npt.NDArray[np.int16]:
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


def parse_blend(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of Megatron's `--data-path`: "weight prefix weight prefix ...", or prefixes alone.

    An odd number of words is prefixes alone, and so is an even number if not one weight is a number. Raises ConfigError
    if some are and some are not.
    """
    prefixes = [word.strip() for word in words]
    if not prefixes:
        raise ConfigError("a blend needs at least one prefix")
    if len(prefixes) % 2 == 1:
        return prefixes, None
    weights = [_number(word) for word in prefixes[0::2]]
    numbers = [weight for weight in weights if weight is not None]
    if not numbers:
        return prefixes, None
    if len(numbers) != len(weights):
        raise ConfigError(f"either all corpora of a blend have a weight or none, got {' '.join(words)}")
    return prefixes[1::2], numbers


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _shares(weights: Sequence[float], num_corpora: int) -> list[float]:
    if len(weights) != num_corpora:
        raise ConfigError(f"{num_corpora} corpora need {num_corpora} weights, got {len(weights)}")
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"weights of a blend must be above 0, got {list(weights)}; leave out a corpus without weight")
    return normalize(weights)
