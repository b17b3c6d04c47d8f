"""Continuing from a checkpoint: what fits what, and the sentences with which the wrong one is refused."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec

from headrace.errors import ConfigError, FormatError
from headrace.position import Position


def check_fits(position: Position, *, source: str, data_size: int, counts_samples: bool) -> None:
    """ConfigError if a checkpoint's position cannot be continued with this source and data_size.

    `counts_samples`: the source finds its place from consumed_samples alone, so data_size may change.
    """
    if not position.source:
        return
    if position.source != source:
        raise ConfigError(
            f"the checkpoint was taken with other data: it says {position.source!r}, this feed reads {source!r}"
        )
    if not counts_samples and position.data_size != data_size:
        raise ConfigError(
            f"the checkpoint was taken with data_size {position.data_size}, this job has {data_size}; a source with a "
            "state of its own can only be continued with the same number of shards"
        )


def encode(position: Position) -> bytes:
    return msgspec.json.encode(position)


def decode(raw: bytes) -> Position:
    return msgspec.json.decode(raw, type=Position)


def source_state(raw: bytes | None) -> Any:
    """What the source's state_dict() returned. Checkpoints are as trusted as the code that loads them.

    FormatError for what cannot be unpickled here.
    """
    try:
        return None if raw is None else pickle.loads(raw)
    except Exception as error:  # damaged bytes raise almost anything
        said = f"{type(error).__name__}: {error}"
        raise FormatError(f"the feed's state is damaged: source_state cannot be unpickled: {said}") from error
