"""Where batches come from: a callable that is told which shard it reads, and returns an iterable of dicts.

    def source(context: SourceContext) -> Iterable[Mapping[str, Any]]: ...

Arrays (NumPy, or CPU tensors) become the fields of a batch; everything else must be JSON-able and arrives as
`batch.extra`. If the iterable has `state_dict()`, its state travels with every batch and comes back through
`load_state_dict()` or `context.state`; otherwise a resumed run draws and drops the batches already consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceContext:
    """What a source is told when it starts."""

    data_rank: int
    data_size: int
    seed: int
    state: Any = None
    """What the iterable's own state_dict() returned at the batch to continue after; None at the start."""


Source = Callable[[SourceContext], Iterable[Mapping[str, Any]]]
