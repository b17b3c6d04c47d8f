"""The largest batch that fits, found by running it, and which batch was fastest on the way.

Doubling finds the first multiple that does not fit, bisection the last one that does. Every size returned was run: a
size "between two that worked" may still fail. All ranks hear of each other's failure before anybody tries the next
size; a rank that raised while the others wait in a collective would hang them, so the search agrees after each probe
and the probe itself must not hold collectives that a failing rank would not reach.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Literal, Protocol, TypeAlias

from headrace.errors import ConfigError, HeadraceError
from headrace.measure.clock import Clock
from headrace.measure.sense import above_zero, whole_at_least

Search: TypeAlias = Literal["binary", "sequential"]
BELOW_MULTIPLE = (8, 4, 2, 1)
"""Sizes tried when not even one multiple fits."""

OUT_OF_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError")
OUT_OF_MEMORY_WORDS = (
    "out of memory",  # CUDA, HIP and NPU say it with their name in front
    "cuda error: memory allocation",
    "cudnn_status_alloc_failed",
    "cublas_status_alloc_failed",
    "defaultcpuallocator",  # torch's CPU allocator raises a plain RuntimeError
    "can't allocate memory",
    "hccl_e_memory",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a probe trained and how long it took, if it times itself: building a model and a first step do not count."""

    samples: int
    seconds: float


class Probe(Protocol):
    """What the search tries. Two full training steps at a size, and everything back as it was before."""

    def run(self, batch_size: int) -> int | Trained:
        """Train two steps or more at this batch size; return how many samples the call trained, or `Trained`.

        Includes the optimizer's step (its state appears there) and uses the longest sequence the data can give.
        Returns when the device is done. Raises whatever running out of memory raises here; anything else ends the
        search. Must not enter a collective that a rank without memory would not reach.
        """

    def restore(self) -> None:
        """Model, optimizer, random state and data position back as before `run`; the device's cache freed.

        Called after every run, failed or not, when no traceback holds the failed run's tensors any more.
        """


AgreeOnMinimum: TypeAlias = Callable[[int], int]
"""The smallest value any rank gave: all ranks call it once per probe, in the same order."""


class BatchSizeError(HeadraceError):
    """No batch size fits. `smallest_tried` is the smallest that was run."""

    def __init__(self, smallest_tried: int, reason: str) -> None:
        self.smallest_tried = smallest_tried
        super().__init__(
            f"not even a batch of {smallest_tried} fits ({reason}); use recompute, a shorter sequence, more model "
            "parallelism or a sharded optimizer"
        )


class ProbeFailed(HeadraceError):
    """The probe raised something that is not a lack of memory, here or on another rank; `batch_size` was tried."""

    def __init__(self, batch_size: int, reason: str) -> None:
        self.batch_size = batch_size
        super().__init__(f"the probe failed at batch size {batch_size}: {reason}")


class BeyondMargin(HeadraceError):
    """A run fitted, but so tightly that a later one may not. The search treats it like running out of memory."""

    def __init__(self, *, reserved_bytes: int, capacity_bytes: int, share: float) -> None:
        self.reserved_bytes, self.capacity_bytes = reserved_bytes, capacity_bytes
        super().__init__(
            f"{reserved_bytes / 2**30:.2f} of {capacity_bytes / 2**30:.2f} GiB were reserved, more than the "
            f"{share:.0%} that may be; raise `memory_share` to use more"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One size that was run. `samples_per_s` is this rank's; None when it did not fit."""

    batch_size: int
    fits: bool
    samples_per_s: float | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizeResult:
    """`largest` is the largest size that was run and fitted; `fastest` the one with the best throughput."""

    largest: int
    fastest: int
    smallest_within: int
    """The smallest size whose throughput is within `tolerance` of the best: the rest of the memory buys nothing."""
    tolerance: float
    multiple: int
    reached_upper: bool
    """The search ended at the given upper limit, not at the memory's."""
    tried: tuple[Tried, ...]
    """Every probe in the order they were run."""
    note: str | None = None


FITS, NO_MEMORY, BROKEN = 2, 1, 0


def find_batch_size(
    probe: Probe,
    *,
    multiple: int = 16,
    upper: int,
    search: Search = "binary",
    agree: AgreeOnMinimum = lambda outcome: outcome,
    tolerance: float = 0.02,
    clock: Clock = perf_counter_ns,
) -> BatchSizeResult:
    """Find the largest multiple of `multiple` up to `upper` that fits on every rank.

    "binary" doubles from one multiple and bisects, about 2 log2 of the answer probes; "sequential" tries one multiple
    after the other. When one multiple does not fit, 8, 4, 2, 1 are tried and the result says so. Blocks while probes
    run. Raises BatchSizeError when nothing fits, ProbeFailed when a probe fails otherwise on any rank, ConfigError for
    limits that leave nothing to try.
    """
    whole_at_least(1, multiple=multiple, upper=upper)
    if not 0.0 <= tolerance < 1.0:
        raise ConfigError(f"tolerance is a share of the best throughput, 0 to below 1, got {tolerance}")
    if search not in ("binary", "sequential"):
        raise ConfigError(f"search is 'binary' or 'sequential', got {search!r}")
    hunt = Hunt(probe, agree=agree, clock=clock)
    limit = upper // multiple
    if search == "binary":
        most = largest_by_bisection(lambda k: hunt.fits(k * multiple), limit)
    else:
        most = largest_in_order(lambda k: hunt.fits(k * multiple), limit)
    largest, note = most * multiple, None
    if most == 0:
        largest = next((size for size in BELOW_MULTIPLE if size < multiple and size <= upper and hunt.fits(size)), 0)
        note = f"below the multiple of {multiple}"
    if largest == 0:
        if not hunt.tried:
            raise ConfigError(f"upper={upper} is below every size there is to try (multiple={multiple})")
        smallest = min(hunt.tried, key=lambda one: one.batch_size)
        raise BatchSizeError(smallest.batch_size, smallest.reason or "out of memory on another rank")
    return summarise(hunt.tried, largest, limit * multiple, multiple, tolerance, note)


def batch_size_table(
    make_probe: Callable[[str], Probe],
    recomputes: Sequence[str] = ("none", "selective", "full"),
    *,
    multiple: int = 16,
    upper: int,
    search: Search = "binary",
    agree: AgreeOnMinimum = lambda outcome: outcome,
    tolerance: float = 0.02,
    clock: Clock = perf_counter_ns,
) -> dict[str, BatchSizeResult | BatchSizeError]:
    """The search repeated per recompute setting: recompute costs time per sample and buys room for more of them.

    `make_probe` builds the probe for one setting. A setting with which nothing fits has its error as its row.
    """
    table: dict[str, BatchSizeResult | BatchSizeError] = {}
    for recompute in recomputes:
        probe = make_probe(recompute)
        try:
            table[recompute] = find_batch_size(
                probe, multiple=multiple, upper=upper, search=search, agree=agree, tolerance=tolerance, clock=clock
            )
        except BatchSizeError as error:
            table[recompute] = error
    return table


def summarise(
    tried: list[Tried], largest: int, limit: int, multiple: int, tolerance: float, note: str | None
) -> BatchSizeResult:
    """Pick the fastest and the smallest that is nearly as fast from what was run."""
    rates = {one.batch_size: one.samples_per_s for one in tried if one.fits and one.samples_per_s is not None}
    best = max(rates.values(), default=0.0)
    return BatchSizeResult(
        largest=largest,
        fastest=max(rates, key=lambda size: rates[size], default=largest),
        smallest_within=min((size for size, rate in rates.items() if rate >= best * (1 - tolerance)), default=largest),
        tolerance=tolerance,
        multiple=multiple,
        reached_upper=largest == limit,
        tried=tuple(tried),
        note=note,
    )


def largest_by_bisection(fits: Callable[[int], bool], limit: int) -> int:
    """The largest k in 1..limit that fits, 0 for none: doubling, then halving the gap between good and bad."""
    good, bad, k = 0, limit + 1, 1
    while k <= limit:
        if not fits(k):
            bad = k
            break
        good, k = k, min(2 * k, limit) if k < limit else limit + 1
    while good and bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def largest_in_order(fits: Callable[[int], bool], limit: int) -> int:
    """The last k of 1, 2, 3, ... that fits before the first that does not."""
    good = 0
    while good < limit and fits(good + 1):
        good += 1
    return good


class Hunt:
    """Runs probes, one after the other, and keeps what came out. All ranks leave `fits` with the same answer."""

    def __init__(self, probe: Probe, *, agree: AgreeOnMinimum, clock: Clock) -> None:
        self.probe, self.agree, self.clock = probe, agree, clock
        self.tried: list[Tried] = []

    def fits(self, batch_size: int) -> bool:
        """Run one size, clean up, and agree with the other ranks."""
        outcome, samples_per_s, reason = self.attempt(batch_size)
        gc.collect()
        try:
            self.probe.restore()
        except Exception as error:
            outcome, reason = BROKEN, f"restoring failed: {type(error).__name__}: {error}"
        try:
            agreed = self.agree(outcome)
        except Exception as error:
            raise ProbeFailed(batch_size, f"a rank left the search: {type(error).__name__}: {error}") from error
        if agreed == BROKEN:
            raise ProbeFailed(batch_size, reason or "another rank failed")
        fits = agreed == FITS
        if not fits and reason is None:
            reason = "out of memory on another rank"
        self.tried.append(
            Tried(batch_size=batch_size, fits=fits, samples_per_s=samples_per_s if fits else None, reason=reason)
        )
        return fits

    def attempt(self, batch_size: int) -> tuple[int, float | None, str | None]:
        """(outcome, samples per second, reason) of one run; no reference to the exception survives."""
        start = self.clock()
        try:
            trained = self.probe.run(batch_size)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            forget_frames(error)
            return (NO_MEMORY if is_out_of_memory(error) else BROKEN), None, reason
        if not isinstance(trained, Trained):
            trained = Trained(samples=trained, seconds=(self.clock() - start) / 1e9)
        return FITS, trained.samples / trained.seconds if above_zero(trained.seconds) else None, None


def forget_frames(error: BaseException | None) -> None:
    """Let go of what the failed calls held, even if somebody keeps the exception.

    Its traceback holds every frame, and those hold the tensors that did not fit (Lightning #7335).
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on CUDA, NPU or CPU: by its type's name, and by its words."""
    if isinstance(error, BeyondMargin) or any(kind.__name__ in OUT_OF_MEMORY_TYPES for kind in type(error).__mro__):
        return True
    text = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(words in text for words in OUT_OF_MEMORY_WORDS)
