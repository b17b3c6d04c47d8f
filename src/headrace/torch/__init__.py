"""What needs torch: tensors, process groups, devices, clocks. The only floor below the adapters that imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("headrace.torch needs PyTorch: pip install 'headrace[torch]'") from error

if TYPE_CHECKING:
    from headrace.torch.feed import Feed

__all__ = ["Feed"]


def __getattr__(name: str) -> object:
    # Looked up when asked for: headrace.torch.measure works without anything of the feed.
    if name != "Feed":
        raise AttributeError(f"module 'headrace.torch' has no attribute {name!r}")
    from headrace.torch.feed import Feed

    return Feed
