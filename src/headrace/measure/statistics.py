"""How sure are we? Medians, quantiles, and the interval of a ratio of two things measured side by side.

Timings on a shared machine drift: minutes are slow, not single steps. So contenders are interleaved in blocks (a block
of A, a block of B, again and again), block i of one is paired with block i of the other, and whole pairs are resampled:
a slow minute then falls on both sides and cancels out of the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.wording import counted

Statistic: TypeAlias = Literal["median", "mean"]
SUM_OVER_SUM: Literal["sum over sum"] = "sum over sum"
Verdict: TypeAlias = Literal["better", "worse", "cannot tell"]
Interpolation: TypeAlias = Literal["linear", "inverted_cdf", "median_unbiased"]
Values: TypeAlias = Sequence[float] | npt.NDArray[np.float64]

MIN_BLOCKS = 6
"""Five pairs that all agree have a sign-test probability of 2 / 2**5 = 6 %: no 95 % statement exists below six."""

DRAWS_AT_ONCE = 1_000_000
"""Resampled values held at a time: 8 MB each for indices and values, however long the input is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioInterval:
    """candidate / reference with its interval. `low` and `high` are None where `reason` says why there is none."""

    estimate: float | None
    low: float | None
    high: float | None
    level: float
    statistic: Statistic | Literal["sum over sum"]
    num_blocks: int
    """Blocks per side (the smaller side when they are not paired)."""
    paired: bool
    reason: str | None = None


def median(values: Values) -> float | None:
    """The middle value (mean of the two middle ones); None for no values."""
    return quantile(values, 0.5)


def p99(values: Values) -> float | None:
    """The 99th percentile. With n values it says little more than the largest one until n is several hundred."""
    return quantile(values, 0.99)


def quantile(values: Values, fraction: float, *, interpolation: Interpolation = "linear") -> float | None:
    """The value below which `fraction` of `values` lie; None for no values.

    `interpolation` is NumPy's name of the rule: "linear" is definition 7, "inverted_cdf" definition 1 (a value that
    was really observed) and "median_unbiased" definition 8 of Hyndman and Fan, The American Statistician 50 (1996).
    Raises ConfigError for a fraction outside 0..1 or a value that is not finite.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ConfigError(f"a quantile lies at a fraction between 0 and 1, got {fraction}")
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return None
    if not np.isfinite(array).all():
        raise ConfigError(f"value {int(np.argmin(np.isfinite(array)))} is not finite: it cannot be ranked")
    return float(np.quantile(array, fraction, method=interpolation))


def ratio_interval(
    candidate: Values,
    reference: Values,
    *,
    statistic: Statistic = "median",
    paired: bool = True,
    level: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> RatioInterval:
    """statistic(candidate) / statistic(reference) with a bootstrap interval of the given level.

    Both sides are float [blocks], positive: one number per block (say, the median step time of the block). `paired`
    resamples pairs and needs equally many blocks; otherwise (two separate runs) each side is resampled by itself, which
    covers the noise inside the runs but not a difference between two starts of the same job.

    The interval is Hesterberg's expanded percentile interval (arXiv:1411.5279; The American Statistician 69, 2015):
    the plain percentile interval is too narrow for few blocks by sqrt((n - 1) / n) and by the normal instead of
    Student's t quantile, so the tail probability is widened for both. Deterministic for a given seed.

    Fewer than MIN_BLOCKS blocks: an estimate without interval, with the reason. Raises ConfigError for values that are
    not positive and finite, or for unequal sides when paired.
    """
    ours, theirs = positive(candidate, "candidate"), positive(reference, "reference")
    if paired and ours.size != theirs.size:
        raise ConfigError(f"paired blocks: candidate has {ours.size} and reference {theirs.size}; give equally many")
    if not 0.0 < level < 1.0:
        raise ConfigError(f"level is a probability such as 0.95, got {level}")
    blocks = int(min(ours.size, theirs.size))
    centre = np.median if statistic == "median" else np.mean
    estimate = float(centre(ours) / centre(theirs)) if blocks else None
    if blocks < MIN_BLOCKS:
        reason = f"{counted(blocks, 'block')}; a {level:.0%} interval needs at least {MIN_BLOCKS}"
        low = high = None
    else:
        ratios = resampled_ratios(ours, theirs, statistic=statistic, paired=paired, resamples=resamples, seed=seed)
        tail = expanded_tail(level, blocks)
        low, high = (float(edge) for edge in np.quantile(ratios, (tail, 1.0 - tail)))
        reason = None
    return RatioInterval(
        estimate=estimate,
        low=low,
        high=high,
        level=level,
        statistic=statistic,
        num_blocks=blocks,
        paired=paired,
        reason=reason,
    )


def ratio_of_sums(
    candidate: npt.NDArray[np.float64],
    reference: npt.NDArray[np.float64],
    *,
    level: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> RatioInterval:
    """The ratio of two figures that are each a sum over a sum (tokens over seconds, seconds over steps).

    Both sides are float64 [blocks, 2]: numerator and denominator of one block of consecutive steps, positive. The
    estimate needs no blocks: it is the quotient of the figures of all steps. Each side's blocks are resampled by
    themselves, and every draw is again a sum over a sum: a block of fast steps counts by its length, not by its rate.
    The interval is widened as in `ratio_interval` and read off the logarithm, so that the interval of seconds per step
    is the reciprocal of that of steps per second.

    Fewer than MIN_BLOCKS blocks: an estimate without interval, with the reason.
    """
    positive(candidate.ravel(), "candidate")
    positive(reference.ravel(), "reference")
    num_blocks = min(len(candidate), len(reference))
    estimate = low = high = reason = None
    if num_blocks:
        estimate = sum_over_sum(candidate) / sum_over_sum(reference)
    if num_blocks < MIN_BLOCKS:
        reason = f"{counted(num_blocks, 'block')}; a {level:.0%} interval needs at least {MIN_BLOCKS}"
    else:
        random = np.random.default_rng(seed)
        logs = np.zeros(resamples)
        for side, sign in ((candidate, 1.0), (reference, -1.0)):
            drawn = side[random.integers(len(side), size=(resamples, len(side)))].sum(axis=1)
            logs += sign * np.log(drawn[:, 0] / drawn[:, 1])
        tail = expanded_tail(level, num_blocks)
        low, high = (math.exp(edge) for edge in np.quantile(logs, (tail, 1.0 - tail)))
    return RatioInterval(
        estimate=estimate,
        low=low,
        high=high,
        level=level,
        statistic=SUM_OVER_SUM,
        num_blocks=num_blocks,
        paired=False,
        reason=reason,
    )


def sum_over_sum(parts: npt.NDArray[np.float64]) -> float:
    """The figure of float64 [steps or blocks, 2]: sum of the first column over sum of the second."""
    numerator, denominator = parts.sum(axis=0)
    return float(numerator / denominator)


def verdict(interval: RatioInterval, *, better: Literal["lower", "higher"], smallest_effect: float = 0.0) -> Verdict:
    """What the interval allows to say about the candidate.

    `better` says which way is good: "lower" for times, "higher" for throughput. The whole interval must lie above
    1 + `smallest_effect` or below its reciprocal, so that a time and its rate get the same verdict (0.01: differences
    under 1 % do not matter to anybody). No interval: "cannot tell".
    """
    if interval.low is None or interval.high is None:
        return "cannot tell"
    if interval.high < 1.0 / (1.0 + smallest_effect):
        return "better" if better == "lower" else "worse"
    if interval.low > 1.0 + smallest_effect:
        return "worse" if better == "lower" else "better"
    return "cannot tell"


def block_values(values: Values, num_blocks: int, *, statistic: Statistic = "mean") -> npt.NDArray[np.float64]:
    """One number per block of consecutive values, float64 [min(num_blocks, len(values))].

    Neighbouring steps resemble each other (a noisy neighbour, a long document), so single steps may not be resampled
    as if they were independent; blocks of consecutive steps may. Block lengths differ by one at most.
    """
    array = np.asarray(values, dtype=np.float64)
    centre = np.median if statistic == "median" else np.mean
    blocks = np.array_split(array, max(1, min(num_blocks, array.size)))
    return np.array([centre(block) for block in blocks if block.size], dtype=np.float64)


def resampled_ratios(
    ours: npt.NDArray[np.float64],
    theirs: npt.NDArray[np.float64],
    *,
    statistic: Statistic,
    paired: bool,
    resamples: int,
    seed: int,
) -> npt.NDArray[np.float64]:
    """The ratio recomputed on `resamples` draws with replacement, float64 [resamples]."""
    random = np.random.default_rng(seed)
    centre = np.median if statistic == "median" else np.mean
    rows = max(1, DRAWS_AT_ONCE // max(ours.size, theirs.size))
    ratios = np.empty(resamples)
    for start in range(0, resamples, rows):
        stop = min(start + rows, resamples)
        own_draws = random.integers(ours.size, size=(stop - start, ours.size))
        their_draws = own_draws if paired else random.integers(theirs.size, size=(stop - start, theirs.size))
        ratios[start:stop] = centre(ours[own_draws], axis=1) / centre(theirs[their_draws], axis=1)
    return ratios


def neighbours_resemble(blocks: Values) -> bool:
    """Whether blocks are still too short to be resampled one by one: neighbouring ranks are alike.

    The lag-1 autocorrelation of n values without memory has mean -1 / n and standard deviation
    (n - 2) / (n sqrt(n - 1)) (Moran, Biometrika 35, 1948); more than two of them above the mean is alike. Of ranks, so
    that a rate and its reciprocal get the same answer and one slow block does not decide.
    """
    centred = ranks(blocks)
    n = centred.size
    if n < 3:
        return False
    centred -= centred.mean()
    power = float(np.dot(centred, centred))
    limit = -1.0 / n + 2.0 * (n - 2) / (n * math.sqrt(n - 1))
    return power > 0.0 and float(np.dot(centred[:-1], centred[1:])) / power > limit


def has_trend(values: Values) -> bool:
    """Whether `values` rise or fall from first to last: the Mann-Kendall test at 1 %, two-sided.

    Pairs in rising order minus pairs in falling order, against its normal approximation with continuity correction
    (Kendall, Rank Correlation Methods). Ties count as neither, which only makes the test more careful. Fewer than six
    values never have a trend.
    """
    array = np.asarray(values, dtype=np.float64)
    n = array.size
    if n < 3:
        return False
    score = abs(float(np.triu(np.sign(array[None, :] - array[:, None]), 1).sum()))
    return score - 1.0 > NormalDist().inv_cdf(0.995) * math.sqrt(n * (n - 1) * (2 * n + 5) / 18.0)


def ranks(values: Values) -> npt.NDArray[np.float64]:
    """Place of each value in ascending order from 0; equal values share the mean of their places."""
    array = np.asarray(values, dtype=np.float64)
    ordered = np.sort(array)
    below, not_above = (np.searchsorted(ordered, array, side=side) for side in ("left", "right"))
    return np.asarray((below + not_above - 1) / 2.0, dtype=np.float64)


def positive(values: Values, side: str) -> npt.NDArray[np.float64]:
    """`values` as float64, each checked: a time or a rate that is not above zero is a broken measurement."""
    array = np.asarray(values, dtype=np.float64)
    bad = ~(np.isfinite(array) & (array > 0.0))
    if bad.any():
        position = int(np.argmax(bad))
        raise ConfigError(f"{side}[{position}] is {array[position]}: a ratio needs positive finite values")
    return array


def expanded_tail(level: float, num_blocks: int) -> float:
    """Tail probability alpha'/2 = Phi(-sqrt(n / (n - 1)) * t(1 - alpha/2, n - 1)) of the expanded interval."""
    widened = math.sqrt(num_blocks / (num_blocks - 1)) * student_t_quantile(0.5 + level / 2.0, num_blocks - 1)
    return NormalDist().cdf(-widened)


def student_t_quantile(probability: float, degrees: int) -> float:
    """Student's t quantile by its Cornish-Fisher expansion, Abramowitz and Stegun 26.7.5.

    Error below 0.1 % from five degrees of freedom on at the usual levels, far below the bootstrap's own noise.
    """
    x = NormalDist().inv_cdf(probability)
    terms = (
        (x**3 + x) / 4.0,
        (5.0 * x**5 + 16.0 * x**3 + 3.0 * x) / 96.0,
        (3.0 * x**7 + 19.0 * x**5 + 17.0 * x**3 - 15.0 * x) / 384.0,
        (79.0 * x**9 + 776.0 * x**7 + 1482.0 * x**5 - 1920.0 * x**3 - 945.0 * x) / 92160.0,
    )
    return x + sum(term / float(degrees) ** power for power, term in enumerate(terms, start=1))
