"""What the micro batches of a step held on one rank: kept as given while the loop runs, added up when there is time.

Whoever counts stands between two micro batches with cold caches (see Note [Cold code] in `step.py`), so counting only
copies; adding up, checking and the operations come later, for several steps at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, TypeAlias

from headrace.errors import ConfigError
from headrace.measure.flops import Attention, StepFlops, Work, step_flops, work_of
from headrace.measure.record import RunFacts
from headrace.measure.throughput import total

MicroBatch: TypeAlias = tuple[int, int | None, int | None, Sequence[int] | None]
"""As it was counted: samples, tokens, padded tokens, document lengths. None: not given."""


class Row(NamedTuple):
    """A micro batch in plain integers."""

    samples: int
    tokens: int | None
    padded_tokens: int | None
    document_lengths: Sequence[int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """Sums over the micro batches of one step. A figure that one of them lacks is None."""

    micro_batch_samples: int = 0
    """Samples of the last micro batch."""
    samples: int | None = None
    tokens: int | None = None
    padded_tokens: int | None = None
    squared_lengths: int | None = None
    flops: StepFlops | None = None


def kept_lengths(document_lengths: Any) -> Any:
    """A copy in plain integers: the caller may use the memory again, and squares of an array's int32 would overflow.

    Never raises: what is no list of numbers is kept as it is, for `add_up` to refuse.
    """
    try:
        return document_lengths.tolist() if hasattr(document_lengths, "tolist") else tuple(document_lengths)
    except Exception:
        return document_lengths


def add_up(micro_batches: Sequence[MicroBatch], facts: RunFacts) -> StepCounts:
    """The sums of one step. Raises ConfigError for a negative count and TypeError for one that is no integer."""
    rows = [plain_counts(one) for one in micro_batches]
    if not rows:
        return StepCounts()
    flops, shape = None, facts.shape
    if shape is not None:
        works = [work_in(row, facts.attention, shape.window) for row in rows]
        known = [work for work in works if work is not None]
        if len(known) == len(works):
            flops = step_flops(shape, sum(known, Work()), facts.recompute)
    return StepCounts(
        micro_batch_samples=rows[-1].samples,
        samples=sum(row.samples for row in rows),
        tokens=total([row.tokens for row in rows]),
        padded_tokens=total([row.padded_tokens for row in rows]),
        squared_lengths=total([squared_lengths(row) for row in rows]),
        flops=flops,
    )


def plain_counts(given: MicroBatch) -> Row:
    """The same in Python's integers, with the tokens that the lengths make where no others were given."""
    samples, tokens, padded_tokens, lengths = given
    lengths = None if lengths is None else [index(length) for length in lengths]
    if tokens is None and lengths is not None:
        tokens = sum(lengths)
    plain = Row(
        index(samples),
        None if tokens is None else index(tokens),
        None if padded_tokens is None else index(padded_tokens),
        lengths,
    )
    if min(plain.samples, plain.tokens or 0, plain.padded_tokens or 0, *(lengths or ())) < 0:
        raise ConfigError(f"a micro batch holds 0 or more of everything, got {plain}")
    if plain.padded_tokens is not None and plain.tokens is not None and plain.tokens > plain.padded_tokens:
        raise ConfigError(f"padded_tokens are real ones and padding together, got {plain}")
    return plain


def even_lengths(row: Row) -> tuple[tuple[int, int], ...] | None:
    """(length, samples of it) where every sample is one document; None where their tokens are not known."""
    computed = row.tokens if row.padded_tokens is None else row.padded_tokens
    if computed is None or row.samples < 1:
        return None
    each, longer = divmod(computed, row.samples)
    return (each, row.samples - longer), (each + 1, longer)


def squared_lengths(row: Row) -> int | None:
    """Sum over documents of length^2."""
    if row.document_lengths is not None:
        return sum(length * length for length in row.document_lengths)
    even = even_lengths(row)
    return None if even is None else sum(length * length * samples for length, samples in even)


def work_in(row: Row, attention: Attention, window: int | None) -> Work | None:
    """What the operations depend on; None where the lengths are not known."""
    if row.document_lengths is not None:
        return work_of(row.document_lengths, attention=attention, window=window)
    even = even_lengths(row)
    if even is None:
        return None
    works = [work_of((length,), attention=attention, window=window, copies=samples) for length, samples in even]
    return sum(works, Work())
