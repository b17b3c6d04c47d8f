"""Samples drawn from several corpora in given proportions: Megatron's BlendedDataset.

Which corpus comes next is drawn (draw.py); inside a corpus samples follow each other. Sizes and the order of roundings
as in BlendedMegatronDatasetBuilder (megatron/core/datasets/blended_megatron_dataset_builder.py, 0.16.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.errors import ConfigError
from headrace.order.draw import BlendIndex, Drawing
from headrace.order.index_cache import BLEND_ARRAYS, IndexCache, blend_identity
from headrace.order.megatron import MegatronOrder
from headrace.order.plan import IntArray, OrderRules
from headrace.order.sample import Part, SampleOrder
from headrace.order.split import check_weights, normalize

MAX_CORPORA = 32766
# Megatron's mid_level_dataset_surplus: rounding must not leave a corpus short of samples.
SURPLUS = 0.005


class BlendedOrder:
    """Samples of `orders`, interleaved as `index` says. See SampleOrder for what it answers.

    Raises ConfigError if an order has fewer samples than are drawn from it, or the orders differ in `row_tokens`.
    """

    def __init__(self, orders: Sequence[SampleOrder], index: BlendIndex) -> None:
        if len({order.row_tokens for order in orders}) != 1:
            raise ConfigError(f"blended corpora must agree on tokens per row, got {[o.row_tokens for o in orders]}")
        self.orders = tuple(orders)
        self.corpus_index, self.corpus_sample_index = index
        """Which order each sample comes from, and which of its samples: Megatron's dataset_index and
        dataset_sample_index."""
        counts = np.bincount(index.corpus_index, minlength=len(orders))
        for corpus, (order, drawn) in enumerate(zip(orders, counts, strict=True)):
            if drawn > len(order):
                raise ConfigError(
                    f"the blend draws {drawn} samples from corpus {corpus}, which has {len(order)}; "
                    "raise `surplus`, or take a larger corpus"
                )

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
    not blended at all. `caches`: one per corpus; the first one keeps the blend as well. Raises ConfigError for weights
    that mean nothing.
    """
    caches = caches or [None] * len(lengths_per_corpus)
    if not 1 <= len(lengths_per_corpus) <= MAX_CORPORA:
        raise ConfigError(f"a blend has 1 to {MAX_CORPORA} corpora, got {len(lengths_per_corpus)}")
    if len(caches) != len(lengths_per_corpus):
        raise ConfigError(f"{len(lengths_per_corpus)} corpora need as many caches, got {len(caches)}")
    if weights is None and len(lengths_per_corpus) == 1:
        return MegatronOrder(lengths_per_corpus[0], rules, cache=caches[0])
    if weights is None:
        orders = _orders(lengths_per_corpus, rules, [None] * len(caches), caches)
        sizes = [len(order) for order in orders]
        if rules.num_samples is None:
            drawing = Drawing(weights=sizes, size=None)
        else:
            drawing = Drawing(weights=normalize(sizes), size=min(rules.num_samples, sum(sizes)))
    else:
        shares = _shares(weights, len(lengths_per_corpus))
        if rules.num_samples is None:
            raise ConfigError("a blend with weights needs `num_samples`, the number of samples to draw")
        wanted = requested_per_corpus(shares, rules.num_samples, surplus=surplus)
        orders = _orders(lengths_per_corpus, rules, wanted, caches)
        # The builder has normalized already, and BlendedDataset does so again: the last bit may change.
        drawing = Drawing(weights=normalize(shares), size=sum(requested_per_corpus(shares, rules.num_samples)))
    index = drawing.draw()
    _keep(index, drawing, orders, caches)
    return BlendedOrder(orders, index)


def _orders(
    lengths_per_corpus: Sequence[IntArray],
    rules: OrderRules,
    wanted: Sequence[int | None],
    caches: Sequence[IndexCache | None],
) -> list[MegatronOrder]:
    return [
        MegatronOrder(lengths, replace(rules, num_samples=number), corpus=corpus, cache=cache)
        for corpus, (lengths, number, cache) in enumerate(zip(lengths_per_corpus, wanted, caches, strict=True))
    ]


def _keep(
    index: BlendIndex, drawing: Drawing, orders: Sequence[MegatronOrder], caches: Sequence[IndexCache | None]
) -> None:
    """Leave the blend for Megatron, in the first corpus's cache if all corpora have one.

    Here it is drawn in every start: nothing checks a blend that was found on disk faster than drawing it.
    """
    kept = [cache for cache in caches if cache is not None]
    if len(kept) == len(caches):
        kept[0].keep(blend_identity(kept, [order.rules for order in orders], drawing), index, BLEND_ARRAYS)


def requested_per_corpus(shares: Sequence[float], num_samples: int, *, surplus: float = 0.0) -> list[int]:
    """Samples to build per corpus: its share rounded up, plus `surplus`, rounded up again."""
    return [math.ceil(math.ceil(num_samples * share) * (1 + surplus)) for share in shares]


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
    check_weights(weights)
    return normalize(weights)
