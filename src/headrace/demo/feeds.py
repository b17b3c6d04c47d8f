"""The three contenders over the same samples, under one handle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from headrace.demo.processes import descendants
from headrace.feed.packed_tokens import PackedTokens
from headrace.torch import Feed
from headrace.torch.contenders import BroadcastFeed, ReplicatedFeed

ARRAYS = ("input_ids", "labels", "shift_labels", "position_ids", "cu_seq_lens_q")
"""What every feed delivers, beside the length of the longest document."""

FEED_TIMEOUT_S = 300.0
"""A death is noticed at once; this only ends a demo that stands still."""

Batch: TypeAlias = Mapping[str, Any]


class OpenFeed:
    """One contender that is running. Owns its helper processes until close()."""

    def __init__(self, name: str, source: PackedTokens, device: torch.device) -> None:
        """Every rank of the job opens its feeds in the same order. Blocks until the others have."""
        self.name = name
        before = descendants(os.getpid())
        self._feed: Any = _OPENERS[name](source, device)
        self.pids = descendants(os.getpid()) - before
        """Processes of this rank that read and pack for this feed: DataLoader workers, or the feeder."""
        self._batches: Iterator[Batch] = iter(self._feed)

    def next(self) -> Batch:
        """The next batch, ready for the model. What the feed raises."""
        return next(self._batches)

    def close(self) -> None:
        """Begin to end its processes. Idempotent."""
        # The iterator of a DataLoader ends its workers when nobody refers to it any more.
        del self._batches
        self._batches = iter(())
        self._feed.close()


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Keyword arguments of a transformers model. Flash attention wants the longest document as a Python int."""
    boundaries, longest = batch["cu_seq_lens_q"], longest_document(batch)
    return {name: batch[name] for name in ARRAYS} | {
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def longest_document(batch: Batch) -> int:
    """Tokens of the longest document: a host int of the feed's batch, a tensor that a broadcast or a loader brought."""
    return int(batch["max_length_q"] if "max_length_q" in batch else batch["max_seqlen"])


def same_bytes(one: Batch, other: Batch) -> bool:
    """Whether both hold the same arrays (integers of the same dtype: equal values are equal bytes)."""
    return longest_document(one) == longest_document(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in ARRAYS
    )


def _open_broadcast(source: PackedTokens, device: torch.device) -> BroadcastFeed:
    return BroadcastFeed(source, group=dist.group.WORLD, device=device)


def _open_replicated(source: PackedTokens, device: torch.device) -> Iterator[Batch]:
    return _OnDevice(ReplicatedFeed(source), device)


def _open_headrace(source: PackedTokens, device: torch.device) -> Feed:
    return Feed(source, group=dist.group.WORLD, device=device, timeout_s=FEED_TIMEOUT_S)


class _OnDevice:
    """Copies what a loader yields to the device; on a CPU there is nothing to copy."""

    def __init__(self, feed: ReplicatedFeed, device: torch.device) -> None:
        self._feed, self._device = feed, device

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._feed)
        if self._device.type == "cpu":
            return batch
        return {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}

    def close(self) -> None:
        self._feed.close()


_OPENERS: Mapping[str, Callable[[PackedTokens, torch.device], Any]] = {
    "broadcast": _open_broadcast,
    "replicated": _open_replicated,
    "headrace": _open_headrace,
}
