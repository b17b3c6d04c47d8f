"""Samples from several corpora by weight, without a list of choices: corpus and number are computed for any sample.

Corpora are the leaves of a binary tree. At each fork a share a / q of the samples goes left: of the first i, exactly
floor(i * a / q) (a Beatty sequence). So sample i goes left if that floor grows with it, and its number there is the
floor itself; the same again in the branch. Integers only, log2(corpora) steps; after any number of samples each corpus
has its share of them, less than one sample per fork off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.order.sample import Part, SampleOrder
from headrace.order.split import check_weights

# Weights that are no integers become some, of so many steps: nobody gives a corpus a share below 1e-12 on purpose.
_STEPS = 2**40


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """`left_weight / weight` of the samples go left."""

    left: Fork | int
    right: Fork | int
    left_weight: int
    weight: int

    def num_left(self, num_samples: int) -> int:
        """How many of the first `num_samples` go left."""
        return num_samples * self.left_weight // self.weight


class ElasticBlend:
    """`num_samples` samples of `orders`, in proportion to `weights`. See SampleOrder for what it answers.

    Sample i is the same whatever `num_samples` is. With whole numbers as weights, as many samples as their sum take
    exactly so many of each corpus. ConfigError if an order has fewer samples than are drawn from it, or the orders
    differ in `row_tokens`, or a weight is not above 0.
    """

    def __init__(self, orders: Sequence[SampleOrder], weights: Sequence[float], *, num_samples: int) -> None:
        if len(weights) != len(orders) or not orders:
            raise ConfigError(f"{len(orders)} corpora need as many weights and at least one, got {len(weights)}")
        check_weights(weights)
        if len({order.row_tokens for order in orders}) != 1:
            raise ConfigError(f"blended corpora must agree on tokens per row, got {[o.row_tokens for o in orders]}")
        self.orders = tuple(orders)
        self._tree = _plant(_whole_shares(weights), 0)
        self._num_samples = num_samples
        for corpus, drawn in _counts(self._tree, num_samples):
            if drawn > len(orders[corpus]):
                raise ConfigError(
                    f"the blend draws {drawn} samples from corpus {corpus}, which has {len(orders[corpus])}; "
                    "give that order more epochs, or its corpus less weight"
                )

    @property
    def row_tokens(self) -> int:
        """Tokens of a full sample."""
        return self.orders[0].row_tokens

    def __len__(self) -> int:
        """Number of samples."""
        return self._num_samples

    def parts(self, sample: int) -> Sequence[Part]:
        """The parts of one sample, see SampleOrder; `corpus` is what the order was made with."""
        corpus, number = self.choice(sample)
        return self.orders[corpus].parts(number)

    def choice(self, sample: int) -> tuple[int, int]:
        """Which corpus a sample comes from, and its number there. IndexError outside [0, len)."""
        if not 0 <= sample < self._num_samples:
            raise IndexError(f"sample {sample} of {self._num_samples}")
        node, number = self._tree, sample
        while isinstance(node, Fork):
            before = node.num_left(number)
            if node.num_left(number + 1) > before:
                node, number = node.left, before
            else:
                node, number = node.right, number - before
        return node, number


def _whole_shares(weights: Sequence[float]) -> list[int]:
    """Whole numbers as they are, so that counts of samples are shared out without a rest; others to 2**-40 of all."""
    if all(isinstance(weight, int) for weight in weights):
        return [int(weight) for weight in weights]
    total = math.fsum(weights)
    return [max(1, round(weight / total * _STEPS)) for weight in weights]


def _plant(weights: Sequence[int], first: int) -> Fork | int:
    """The tree over corpora `first`, `first` + 1, ...: halves by number."""
    if len(weights) == 1:
        return first
    half = len(weights) // 2
    return Fork(
        left=_plant(weights[:half], first),
        right=_plant(weights[half:], first + half),
        left_weight=sum(weights[:half]),
        weight=sum(weights),
    )


def _counts(node: Fork | int, num_samples: int) -> Iterator[tuple[int, int]]:
    """How many of the first `num_samples` each corpus gives."""
    if isinstance(node, int):
        yield node, num_samples
    else:
        num_left = node.num_left(num_samples)
        yield from _counts(node.left, num_left)
        yield from _counts(node.right, num_samples - num_left)
