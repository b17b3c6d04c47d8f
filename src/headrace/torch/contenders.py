"""The two usual ways of getting a batch to every rank of a group, to be measured beside the feed.

broadcast    The group's first rank takes prefetched batches from a DataLoader and broadcasts field by field, in order
             of Megatron-LM core_v0.16.1's `get_batch_on_this_tp_rank` (megatron/training/utils.py): the other ranks
             allocate, learn the number of boundaries first, and read it back on the host.
replicated   Every rank has its own prefetching DataLoader over the same samples, as torchtitan and Megatron-Bridge do.

Both read the same store through the same C packing as the feeder, in `num_workers` worker processes per DataLoader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from headrace.feed.packed_tokens import PackedTokens
from headrace.spec import Field


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Micro batch i of a shard as item i. Opens the store where it is read: in the worker."""

    def __init__(self, source: PackedTokens, *, data_rank: int, data_size: int) -> None:
        self._source, self._data_rank, self._data_size = source, data_rank, data_size
        self._batches: Any = None
        self._length = len(source.open_batches(data_rank=data_rank, data_size=data_size))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self._batches is None:
            self._batches = self._source.open_batches(data_rank=self._data_rank, data_size=self._data_size)
        batch = self._batches[index]
        return {name: torch.from_numpy(value) for name, value in batch.items() if isinstance(value, np.ndarray)} | {
            "max_seqlen": torch.tensor(batch["max_seqlen"], dtype=torch.int32)
        }


def _loader(
    source: PackedTokens, data_rank: int, data_size: int, num_workers: int
) -> DataLoader[dict[str, torch.Tensor]]:
    dataset = PackedDataset(source, data_rank=data_rank, data_size=data_size)
    return DataLoader(dataset, batch_size=None, num_workers=num_workers, prefetch_factor=2 if num_workers else None)


class ReplicatedFeed:
    """Every rank reads and packs for itself. Iterate; a batch is the caller's."""

    def __init__(self, source: PackedTokens, *, data_rank: int = 0, data_size: int = 1, num_workers: int = 2) -> None:
        self._iterator: Iterator[dict[str, torch.Tensor]] | None = iter(
            _loader(source, data_rank, data_size, num_workers)
        )

    def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
        return self

    def __next__(self) -> Mapping[str, torch.Tensor]:
        assert self._iterator is not None, "closed"
        return next(self._iterator)

    def close(self) -> None:
        """End the workers, which live as long as the iterator."""
        self._iterator = None


class BroadcastFeed:
    """The group's first rank reads and packs, the others receive. Iterate on all ranks; a batch is the caller's.

    `group` None: all ranks of the job.
    """

    def __init__(
        self,
        source: PackedTokens,
        *,
        group: dist.ProcessGroup,
        data_rank: int = 0,
        data_size: int = 1,
        num_workers: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        self._group, self._source_rank = group, dist.get_process_group_ranks(group)[0]
        self._is_source = dist.get_rank() == self._source_rank
        self._device = torch.device(device)
        spec = source.batch_spec()
        self._dense: tuple[Field, ...] = tuple(field for field in spec.fields if not field.ragged)
        (self._boundaries,) = (field.name for field in spec.fields if field.ragged)
        self._iterator = iter(_loader(source, data_rank, data_size, num_workers)) if self._is_source else None
        # Every rank knows the length, as every Megatron rank knows train_iters.
        self._num_left = len(source.open_batches(data_rank=data_rank, data_size=data_size))

    def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
        return self

    def __next__(self) -> Mapping[str, torch.Tensor]:
        if self._num_left == 0:
            raise StopIteration
        self._num_left -= 1
        if self._is_source:
            assert self._iterator is not None, "closed"
            return self._send(next(self._iterator))
        return self._receive()

    def _send(self, item: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch = {name: tensor.to(self._device, non_blocking=True) for name, tensor in item.items()}
        for field in self._dense:
            self._broadcast(batch[field.name])
        boundaries = batch[self._boundaries]
        self._broadcast(torch.tensor(boundaries.numel(), dtype=torch.int64, device=self._device))
        self._broadcast(boundaries)
        self._broadcast(batch["max_seqlen"])
        return batch

    def _receive(self) -> dict[str, torch.Tensor]:
        batch = {}
        for field in self._dense:
            dtype = getattr(torch, field.dtype)
            batch[field.name] = torch.empty(field.shape, dtype=dtype, device=self._device)
            self._broadcast(batch[field.name])
        num_boundaries = torch.empty((), dtype=torch.int64, device=self._device)
        self._broadcast(num_boundaries)
        batch[self._boundaries] = torch.empty(int(num_boundaries.item()), dtype=torch.int32, device=self._device)
        self._broadcast(batch[self._boundaries])
        batch["max_seqlen"] = torch.empty((), dtype=torch.int32, device=self._device)
        self._broadcast(batch["max_seqlen"])
        return batch

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, self._source_rank, group=self._group)

    def close(self) -> None:
        """End the workers, which live as long as the iterator."""
        self._iterator = None
