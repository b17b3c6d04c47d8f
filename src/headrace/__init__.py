"""headrace: one reader per model replica and host, every rank fed from lock-free shared memory; and the step measured.

from headrace import PackedTokens
from headrace.torch import Feed
"""

import sys as _sys

if _sys.platform != "linux":
    raise ImportError(f"headrace needs Linux (memfd and futex); this is {_sys.platform}")

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
from headrace.packing import PackRules, pack

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
    "pack",
]
