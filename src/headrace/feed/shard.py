"""Opening a source for one shard, at a position."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

from headrace.errors import ConfigError, HeadraceError, SourceError
from headrace.feed.items import ItemProduction
from headrace.feed.production import Production
from headrace.feed.resume import check_fits, source_state
from headrace.feed.source import SourceContext
from headrace.position import Position


def open_shard(source: Any, position: Position, *, data_rank: int, data_size: int, seed: int) -> Production:
    """A Production over `source`: its own if it makes one, as PackedTokens does, else over the dicts it yields.

    ConfigError if the position is of other data; whatever the source raises.
    """
    counts_samples = hasattr(source, "open_production")
    check_fits(position, source=identity(source), data_size=data_size, counts_samples=counts_samples)
    if counts_samples:
        production: Production = source.open_production(
            data_rank=data_rank,
            data_size=data_size,
            consumed_samples=position.consumed_samples,
            state=source_state(position.source_state),
        )
        return production
    state = source_state(position.source_state)
    items = source(SourceContext(data_rank=data_rank, data_size=data_size, seed=seed, state=state))
    if not hasattr(items, "__iter__"):
        raise ConfigError(f"the source returned a {type(items).__name__}; it must return an iterable of dicts")
    production_of_items = ItemProduction(items, num_shards=data_size)
    production_of_items.resume(
        source_state=state,
        num_drawn=position.consumed_batches,
        consumed_samples=position.consumed_samples,
    )
    return production_of_items


def check(source: Any) -> None:
    """ConfigError for one that contradicts itself, whatever its data hold: only a source of our own can tell."""
    if hasattr(source, "open_production"):
        source.check()


def identity(source: Any) -> str:
    """What a checkpoint remembers of the data: the source's own `identity()`, else its name.

    SourceError for what a source's own answer raises, unless it is an error of ours.
    """
    own = getattr(source, "identity", None)
    if callable(own):
        return _answer_of(own, "identity()")
    named = source if hasattr(source, "__qualname__") else type(source)
    return f"{named.__module__}.{named.__qualname__}"


def description(source: Any) -> str:
    """What must be the same on all ranks, as far as it can be told. SourceError like `identity`."""
    return _answer_of(lambda: repr(source), "repr") if dataclasses.is_dataclass(source) else identity(source)


def _answer_of(ask: Callable[[], object], what: str) -> str:
    try:
        return str(ask())
    except HeadraceError:
        raise
    except Exception as error:
        # format_exception_only survives an exception whose own __str__ raises.
        said = traceback.format_exception_only(error)[-1].strip()
        raise SourceError(f"the source's {what} raised {said}", source_traceback=traceback.format_exc()) from error
