"""Which token stores a source reads: one, or a blend of several.

"wiki"                              one corpus
[(0.7, "wiki"), (0.3, "code")]      7 of 10 samples from the first
["wiki", "code"]                    as many samples from each as it has
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from numbers import Real
from typing import Any

from headrace.errors import ConfigError
from headrace.order import parse_blend
from headrace.order.split import check_weights, normalize
from headrace.store import TokenStore
from headrace.store.format import prefix_of

Corpora = str | os.PathLike[str] | Sequence[str] | Sequence[tuple[float, str]]
"""As a user writes them down, see above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blend:
    """Corpora in the order of their numbers (headrace.order.Part.corpus)."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    """One above 0 for each; None: none was given."""

    @property
    def is_one_corpus(self) -> bool:
        """Nothing to blend. A single corpus with a weight is a blend, as for Megatron."""
        return self.weights is None and len(self.prefixes) == 1

    def identity(self) -> str:
        """What is in the corpora and how much of each is taken, wherever they lie."""
        prints = fingerprints(self.prefixes)
        if self.is_one_corpus:
            return f"corpus {prints[0]}"
        if self.weights is None:
            return f"corpora {', '.join(prints)}"
        shares = zip(normalize(self.weights), prints, strict=True)
        return f"corpora {', '.join(f'{share!r} of {digits}' for share, digits in shares)}"


def read_corpora(written: Corpora) -> Blend:
    """ConfigError, with the corpus, for weights that mean nothing and for one corpus twice."""
    if isinstance(written, str | os.PathLike):
        return Blend(prefixes=(os.fspath(written),), weights=None)
    entries: list[Any] = list(written) if isinstance(written, Sequence) else []
    if not entries:
        raise ConfigError(f"give a prefix, or a blend such as [(0.7, 'wiki'), (0.3, 'code')], got {written!r}")
    if all(isinstance(entry, str | os.PathLike) for entry in entries):
        blend = Blend(prefixes=tuple(os.fspath(entry) for entry in entries), weights=None)
    else:
        pairs = [_weighted(entry) for entry in entries]
        weights = tuple(weight for weight, _ in pairs)
        check_weights(weights)
        blend = Blend(prefixes=tuple(prefix for _, prefix in pairs), weights=weights)
    _require_different(blend.prefixes)
    return blend


def read_data_path(words: str | Sequence[str]) -> Corpora:
    """Megatron's `--data-path`: "30 wiki 70 code", prefixes alone, or one of them. ConfigError for a mixture."""
    prefixes, weights = parse_blend(words.split() if isinstance(words, str) else words)
    if weights is None:
        return prefixes[0] if len(prefixes) == 1 else prefixes
    return list(zip(weights, prefixes, strict=True))


def fingerprints(prefixes: Sequence[str]) -> list[str]:
    """Of each store. ConfigError for one that is not there."""
    found = []
    for prefix in prefixes:
        with TokenStore(prefix, walk_index=False) as store:
            found.append(store.fingerprint())
    return found


def open_stores(prefixes: Sequence[str], resources: ExitStack, *, walk_index: bool = True) -> list[TokenStore]:
    """All of them, closed with `resources`."""
    return [resources.enter_context(TokenStore(prefix, walk_index=walk_index)) for prefix in prefixes]


def _weighted(entry: Any) -> tuple[float, str]:
    if isinstance(entry, str | os.PathLike):
        raise ConfigError(f"either all corpora of a blend have a weight or none, {os.fspath(entry)!r} has none")
    if not isinstance(entry, Sequence) or len(entry) != 2 or not isinstance(entry[1], str | os.PathLike):
        raise ConfigError(f"a corpus of a blend is (weight, prefix), such as (0.7, 'wiki'), got {entry!r}")
    weight, prefix = entry[0], os.fspath(entry[1])
    try:
        number = math.nan if isinstance(weight, bool) or not isinstance(weight, Real) else float(weight)
    except OverflowError:
        number = weight = math.inf
    if not 0 < number < math.inf:
        raise ConfigError(
            f"the weight of {prefix!r} must be a number above 0, got {weight!r}; leave out a corpus without weight"
        )
    return number, prefix


def _require_different(prefixes: Sequence[str]) -> None:
    """By their files: one corpus twice would be read by two orders that know nothing of each other."""
    seen: dict[str, str] = {}
    for prefix in prefixes:
        file = os.path.realpath(prefix_of(prefix))
        if file in seen:
            twice = repr(prefix) if prefix == seen[file] else f"{seen[file]!r} and {prefix!r} are one corpus; it"
            raise ConfigError(f"{twice} is in the blend twice; name it once, with the sum of its weights")
        seen[file] = prefix
