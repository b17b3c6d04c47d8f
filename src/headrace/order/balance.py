"""Dealing out the samples of one optimizer step so that no data rank waits for another's long documents.

A step takes data_size * micro_batches * micro_batch_size samples. All ranks wait for the slowest at its end, so what
counts first is each rank's sum. With pipeline parallelism, or parameters gathered per micro batch, they also wait
inside the step, so micro batches of one turn should cost alike. Three moves, on costs alone:

    ranks          the most expensive sample first, each to the rank with the least so far that has room (Graham's LPT
                   rule, SIAM J. Appl. Math. 17, 1969, with equal numbers of samples); then swaps between the most
                   expensive rank and others, as long as they lower it
    micro batches  the same inside each rank
    turns          each rank's most expensive micro batch first: equals meet equals

The samples of a step stay the same, only their places change. Where the stored order is as good, it is kept.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

# A swap is looked for between the most expensive rank and so many of the least expensive ones.
_PARTNERS = 8
# Swaps end where the most expensive rank is within this of the bound: further ones gain nothing anybody could measure.
_CLOSE_ENOUGH = 1.001


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """How a step divides: `data_size` ranks take `micro_batches` micro batches of `micro_batch_size` samples each."""

    data_size: int
    micro_batches: int
    micro_batch_size: int

    @property
    def samples_per_rank(self) -> int:
        """Samples of one rank."""
        return self.micro_batches * self.micro_batch_size

    @property
    def num_samples(self) -> int:
        """Samples of all ranks."""
        return self.data_size * self.samples_per_rank

    def places(self, turn: int, rank: int) -> range:
        """Where the rows of one micro batch lie in a step dealt out turn by turn, as Shard does."""
        start = (turn * self.data_size + rank) * self.micro_batch_size
        return range(start, start + self.micro_batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """What a step costs under one way of dealing, in the units of the samples' costs."""

    slowest_rank: int
    """Sum of the most expensive rank: the step's time where ranks meet at its end only."""
    slowest_turns: int
    """Sum over the turns of their most expensive micro batch: the step's time where ranks meet in every turn."""
    mean_rank: float
    """Sum of all samples / data_size: what nothing can go below."""

    @property
    def waits(self) -> tuple[int, int]:
        """What to compare by: the step's end first, then the turns."""
        return self.slowest_rank, self.slowest_turns

    @property
    def spread(self) -> float:
        """Most expensive over mean rank, at least 1."""
        return self.slowest_rank / self.mean_rank if self.mean_rank else 1.0


def deal(costs: Sequence[int], shape: StepShape) -> list[int]:
    """Which sample of the step goes to each place (see StepShape.places): a permutation of [0, num_samples).

    `costs`: one per sample, not negative. Depends on nothing else, so every feeder finds the same. Never costs more
    at the step's end than the stored order. About 10 to 30 us per sample.
    """
    stored = list(range(shape.num_samples))
    per_rank = _divide(stored, costs, shape.data_size)
    order = [0] * shape.num_samples
    for rank, samples in enumerate(per_rank):
        micro_batches = _divide(samples, costs, shape.micro_batches)
        micro_batches.sort(key=lambda one: (-sum(costs[sample] for sample in one), one))
        for turn, micro_batch in enumerate(micro_batches):
            for place, sample in zip(shape.places(turn, rank), micro_batch, strict=True):
                order[place] = sample
    return min((order, stored), key=lambda one: step_cost(costs, one, shape).waits)


def step_cost(costs: Sequence[int], order: Sequence[int], shape: StepShape) -> StepCost:
    """What `order` makes of a step."""
    per_turn = [
        [sum(costs[order[place]] for place in shape.places(turn, rank)) for rank in range(shape.data_size)]
        for turn in range(shape.micro_batches)
    ]
    return StepCost(
        slowest_rank=max(map(sum, zip(*per_turn, strict=True))),
        slowest_turns=sum(map(max, per_turn)),
        mean_rank=sum(map(sum, per_turn)) / shape.data_size,
    )


def lowest_slowest_rank(costs: Sequence[int], shape: StepShape) -> int:
    """No way of dealing has its most expensive rank below this: the mean (rounded up), or what single samples prevent.

    Of the k * data_size + 1 most expensive samples some rank takes k + 1; they cost at least as much as the k + 1
    least of those, and the rest of that rank at least as much as the least samples of the step.
    """
    falling = sorted(costs, reverse=True)
    upto = [0, *accumulate(falling)]
    total = upto[-1]
    bound = -(-total // shape.data_size)
    for k in range(shape.samples_per_rank):
        last = k * shape.data_size + 1
        rest = shape.samples_per_rank - (k + 1)
        bound = max(bound, upto[last] - upto[last - k - 1] + total - upto[len(falling) - rest])
    return bound


def _divide(samples: Sequence[int], costs: Sequence[int], num_bins: int) -> list[list[int]]:
    """`samples` in `num_bins` lists of one length and as nearly one cost as LPT and swaps get; ties by number."""
    capacity = len(samples) // num_bins
    if num_bins == 1 or capacity == 1:
        falling = sorted(samples, key=lambda sample: (-costs[sample], sample))
        return [falling[first : first + capacity] for first in range(0, len(falling), capacity)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    open_bins = [(0, number) for number in range(num_bins)]
    for sample in sorted(samples, key=lambda sample: (-costs[sample], sample)):
        cost, number = heapq.heappop(open_bins)
        bins[number].append(sample)
        if len(bins[number]) < capacity:
            heapq.heappush(open_bins, (cost + costs[sample], number))
    bound = lowest_slowest_rank(
        [costs[sample] for sample in samples],
        StepShape(data_size=num_bins, micro_batches=capacity, micro_batch_size=1),
    )
    _swap(bins, costs, int(bound * _CLOSE_ENOUGH))
    return bins


def _swap(bins: list[list[int]], costs: Sequence[int], target: int) -> None:
    """Exchange pairs of samples in place until the most expensive bin is at `target`, or no exchange lowers it."""
    for one in bins:
        one.sort(key=lambda sample: (costs[sample], sample))
    sums = [sum(costs[sample] for sample in one) for one in bins]
    for _ in range(8 * len(bins)):
        by_cost = sorted(range(len(bins)), key=lambda number: (sums[number], number))
        highest = by_cost.pop()
        if sums[highest] <= target:
            return
        found = [
            (left, number, mine, its)
            for number in by_cost[:_PARTNERS]
            for left, mine, its in _best_exchange(bins[highest], bins[number], costs, sums[highest] - sums[number])
        ]
        if not found:
            return
        _, number, mine, its = min(found)
        moved = costs[bins[highest][mine]] - costs[bins[number][its]]
        sums[highest] -= moved
        sums[number] += moved
        bins[highest][mine], bins[number][its] = bins[number][its], bins[highest][mine]
        for changed in (highest, number):
            bins[changed].sort(key=lambda sample: (costs[sample], sample))


def _best_exchange(
    dear: Sequence[int], cheap: Sequence[int], costs: Sequence[int], difference: int
) -> list[tuple[int, int, int]]:
    """The exchange that leaves two bins closest, as (what is left, place in `dear`, place in `cheap`); or none.

    Both ascend in cost. Moving d > 0 from one to the other leaves |difference - 2 d|, an improvement if that is less.
    """
    prices = [costs[sample] for sample in cheap]
    best: list[tuple[int, int, int]] = []
    for mine, sample in enumerate(dear):
        wanted = bisect_left(prices, costs[sample] - difference / 2)
        for its in range(max(0, wanted - 1), min(len(prices), wanted + 1)):
            left = abs(difference - 2 * (costs[sample] - prices[its]))
            if left < difference and (not best or left < best[0][0]):
                best = [(left, mine, its)]
    return best
