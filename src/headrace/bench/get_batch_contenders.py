"""The contenders of `headrace bench get-batch`, all over one source: each hands out the same tensors in host memory.

headrace     headrace.torch.Feed: a feeder process, a ring of `num_slots`
broadcast    the first rank's DataLoader, then one broadcast per field (headrace.torch.contenders)
megatron     the same over megatron-core's own GPTDataset (megatron_dataset.py)
replicated   every rank its own DataLoader (the same)
iceoryx2     a producer process packs into loaned samples; views by address (iceoryx2_ring.py). Lean: no validity check,
             no state to checkpoint, no growth, no error in band; it is given every shortcut its interface has.

`take()` is what is timed: the next batch, and each of its fields looked at once, as a training loop would. No contender
makes a torch call in it that it does not need to deliver: the lengths that other code reads with `.item()` stay as they
came (a tensor for the DataLoaders', a Python int for the other two).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol, TypeAlias

import torch

from headrace.bench.iceoryx2_ring import Place, Services, Subscriber, counts_at, fields_of, lay_out, memory_at
from headrace.bench.megatron_dataset import MegatronFeed
from headrace.feed.packed_tokens import PackedTokens
from headrace.torch import Feed
from headrace.torch.contenders import BroadcastFeed, ReplicatedFeed
from headrace.torch.feed import as_tensor

Taken: TypeAlias = tuple[Any, Any, Any, Any, Any, Any]
"""tokens, labels, loss_mask, position_ids, cu_seqlens, max_seqlen."""

NUM_WORKERS = 2
"""Per DataLoader: what the published loops use, and with `prefetch_factor` 2 as many batches ahead as four slots."""


class Contender(Protocol):
    """One way of getting batches, ready to deliver. Used by one thread."""

    def take(self) -> Taken:
        """The next batch of this rank's group, valid until the next call. Blocks."""

    def close(self) -> None:
        """End what works in the background."""


class OverMapping:
    """A feed whose batches are mappings."""

    def __init__(self, feed: Any, *, host_ints: bool) -> None:
        self._feed, self.close = feed, feed.close
        self.take = self._take_with_ints if host_ints else self._take

    def _take(self) -> Taken:
        batch = next(self._feed)
        return (
            batch["tokens"],
            batch["labels"],
            batch["loss_mask"],
            batch["position_ids"],
            batch["cu_seqlens"],
            batch["max_seqlen"],
        )

    def _take_with_ints(self) -> Taken:
        batch = next(self._feed)
        return (
            batch["tokens"],
            batch["labels"],
            batch["loss_mask"],
            batch["position_ids"],
            batch["cu_seqlens"],
            batch.max_seqlen,
        )


class OverIceoryx2:
    """A subscriber of this rank; the first rank also owns the producer."""

    def __init__(self, source: PackedTokens, place: Place, *, num_slots: int, num_readers: int, first: bool) -> None:
        self._producer = start_producer(source, place, num_slots=num_slots, num_readers=num_readers) if first else None
        self._places, self._nbytes = lay_out(source.batch_spec())
        self._subscriber = Subscriber(Services(place, num_slots=num_slots, num_readers=num_readers))
        self._known: dict[int, tuple[Any, dict[int, dict[str, Any]]]] = {}

    def take(self) -> Taken:
        address = self._subscriber.receive()
        known = self._known.get(address)
        if known is None:
            known = self._known[address] = (counts_at(address), {})
        counts, by_length = known
        batch = by_length.get(counts[0])
        if batch is None:
            batch = by_length[counts[0]] = self._view(address, counts[0])
        return (
            batch["tokens"],
            batch["labels"],
            batch["loss_mask"],
            batch["position_ids"],
            batch["cu_seqlens"],
            counts[1],
        )

    def _view(self, address: int, num_boundaries: int) -> dict[str, Any]:
        arrays = fields_of(memory_at(address, self._nbytes), self._places)
        arrays["cu_seqlens"] = arrays["cu_seqlens"][:num_boundaries]
        return {name: as_tensor(array) for name, array in arrays.items()}

    def close(self) -> None:
        if self._producer is not None:
            # Inside `send` it holds its interpreter and hears of no signal that Python would have to handle.
            self._producer.kill()
            self._producer.wait()


def start_producer(source: PackedTokens, place: Place, *, num_slots: int, num_readers: int) -> subprocess.Popen[bytes]:
    """The process that packs for iceoryx2. It dies with the thread that started it."""
    charge = {"source": asdict(source), "place": asdict(place), "num_slots": num_slots, "num_readers": num_readers}
    return subprocess.Popen([sys.executable, "-m", "headrace.bench.iceoryx2_producer", json.dumps(charge)])


def maker(
    name: str, source: PackedTokens, *, place: Place | None, num_slots: int, rank: int, num_ranks: int
) -> Callable[[], Contender]:
    """How to make a contender of the default process group. Every rank makes them in the same order."""
    group = torch.distributed.group.WORLD

    def make() -> Contender:
        if name == "headrace":
            return OverMapping(Feed(source, group=group, num_slots=num_slots), host_ints=True)
        if name == "broadcast":
            return OverMapping(BroadcastFeed(source, group=group, num_workers=NUM_WORKERS), host_ints=False)
        if name == "megatron":
            return OverMapping(MegatronFeed(source, group=group, num_workers=NUM_WORKERS), host_ints=False)
        if name == "replicated":
            return OverMapping(ReplicatedFeed(source, num_workers=NUM_WORKERS), host_ints=False)
        assert place is not None, "iceoryx2 needs a place for its files"
        return OverIceoryx2(source, place, num_slots=num_slots, num_readers=num_ranks, first=rank == 0)

    return make
