"""headrace: one reader per model replica and host, every rank fed from lock-free shared memory; and the step measured.

    from headrace import PackedTokens
    from headrace.torch import Feed

Names are looked up when they are asked for: who only measures loads nothing of the feed, and `headrace --help` neither.
"""

from __future__ import annotations

import importlib as _importlib
import sys as _sys
from typing import TYPE_CHECKING

if _sys.platform != "linux":
    raise ImportError(f"headrace needs Linux (memfd and futex); this is {_sys.platform}")

if TYPE_CHECKING:
    from headrace.errors import (
        BatchTooLarge,
        ConfigError,
        FeedClosed,
        FeedTimeout,
        FormatError,
        HeadraceError,
        PeerGone,
        SourceError,
    )
    from headrace.feed import Batch, FeedConfig, FeedStats, SourceContext
    from headrace.feed.packed_tokens import PackedTokens
    from headrace.packing import PackRules, View, pack

_HOMES = {
    "headrace.errors": (
        "BatchTooLarge",
        "ConfigError",
        "FeedClosed",
        "FeedTimeout",
        "FormatError",
        "HeadraceError",
        "PeerGone",
        "SourceError",
    ),
    "headrace.feed": ("Batch", "FeedConfig", "FeedStats", "SourceContext"),
    "headrace.feed.packed_tokens": ("PackedTokens",),
    "headrace.packing": ("PackRules", "View", "pack"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Batch",
    "BatchTooLarge",
    "ConfigError",
    "FeedClosed",
    "FeedConfig",
    "FeedStats",
    "FeedTimeout",
    "FormatError",
    "HeadraceError",
    "PackRules",
    "PackedTokens",
    "PeerGone",
    "SourceContext",
    "SourceError",
    "View",
    "pack",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = globals()[name] = getattr(_importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
