"""Where a feed is in its data, and what a checkpoint holds of it.

The state is small, the same on every rank, counts consumed samples of the whole job (not prefetched ones), and knows
nothing of tensor, context or pipeline parallelism: it may be loaded into a job of another shape, or another data_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.errors import FormatError

STATE_VERSION = 1
MAX_COUNT = 2**63 - 1
"""Counts travel as int64 in a slot's descriptor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a feed is in its data. All zero: at the beginning."""

    consumed_samples: int = 0
    consumed_batches: int = 0
    """Of one shard: what a source without a state of its own must draw and drop."""
    data_size: int = 1
    source: str = ""
    """What identifies the data; another corpus is refused."""
    source_state: bytes | None = None


def to_state_dict(position: Position) -> dict[str, Any]:
    """Plain ints, strings and bytes: goes through torch.distributed.checkpoint, pickle or any other way."""
    return {
        "version": STATE_VERSION,
        "consumed_samples": position.consumed_samples,
        "consumed_batches": position.consumed_batches,
        "data_size": position.data_size,
        "source": position.source,
        "source_state": position.source_state,
    }


def from_state_dict(state: dict[str, Any]) -> Position:
    """FormatError for what is no state of ours, or of a version this headrace does not know."""
    version = state.get("version") if isinstance(state, dict) else None
    if version != STATE_VERSION:
        raise FormatError(f"the feed's state has version {version!r}, this headrace reads version {STATE_VERSION}")
    try:
        position = msgspec.convert(
            {key: value for key, value in state.items() if key != "version"}, Position, strict=True
        )
    except msgspec.ValidationError as error:
        raise FormatError(f"the feed's state is damaged: {error}") from error
    for name, lowest in (("consumed_samples", 0), ("consumed_batches", 0), ("data_size", 1)):
        if not lowest <= getattr(position, name) <= MAX_COUNT:
            raise FormatError(
                f"the feed's state is damaged: {name} must lie in [{lowest}, 2**63), got {getattr(position, name)}"
            )
    if not position.source and (position.consumed_samples or position.consumed_batches):
        raise FormatError("the feed's state is damaged: it has consumed samples of a source that it does not name")
    return position
