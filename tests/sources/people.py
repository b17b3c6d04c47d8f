"""Data in the forms people have, each as a source: read in the feeder, or by the rank that holds the iterator.

No torch at the top: a feeder imports what its source needs and nothing else.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.feed import SourceContext

NUM_ROWS = 11
BATCH = 3


def row(index: int) -> dict[str, Any]:
    return {"input_ids": np.arange(index, index + 4), "weight": np.float32(index / 2)}


def shard(context: SourceContext) -> list[int]:
    return list(range(NUM_ROWS))[context.data_rank :: context.data_size]


def generator_of_dicts(context: SourceContext) -> Iterator[dict[str, Any]]:
    """Ragged shapes, extra keys, an image that is none in some batches."""
    for index in shard(context):
        yield {
            "tokens": np.arange(index, dtype=np.int32),
            "image": np.full((index % 3, 2, 2), index, np.uint8),
            "url": f"file-{index}",
            "answer": {"index": index, "tags": ["a"] * (index % 2)},
        }


def data_loader(context: SourceContext) -> Iterable[Any]:
    """torch's DataLoader: shuffled by a generator of its own, the last batch is short."""
    import torch

    rows = [row(index) for index in shard(context)]
    order = torch.Generator().manual_seed(context.seed)
    return torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True, generator=order)


def stateful_data_loader(context: SourceContext) -> Iterable[Any]:
    """torchdata's, as it is: its state travels with the batches."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader([row(index) for index in shard(context)], batch_size=BATCH)


class Dataset:
    """The part of a Hugging Face `datasets.Dataset` that a source needs: shard, format, iterate in batches."""

    def __init__(self, indices: list[int]) -> None:
        self._indices = indices

    def shard(self, num_shards: int, index: int) -> Dataset:
        return Dataset(self._indices[index::num_shards])

    def with_format(self, kind: str) -> Dataset:
        assert kind == "numpy"
        return self

    def iter(self, batch_size: int, drop_last_batch: bool = False) -> Iterator[dict[str, Any]]:
        assert not drop_last_batch
        for first in range(0, len(self._indices), batch_size):
            rows = [row(index) for index in self._indices[first : first + batch_size]]
            yield {name: np.stack([one[name] for one in rows]) for name in rows[0]}


def hugging_face_dataset(context: SourceContext) -> Iterator[dict[str, Any]]:
    dataset: Any = Dataset(list(range(NUM_ROWS)))
    mine = dataset.shard(num_shards=context.data_size, index=context.data_rank).with_format("numpy")
    return mine.iter(batch_size=BATCH)


@dataclass
class Sample:
    """A batch as Energon's loaders yield it: a dataclass, not a dict."""

    __key__: list[str]
    tokens: np.ndarray


class EnergonLoader:
    """The part of Megatron Energon's SavableDataLoader that a source needs: batches, and a state by its own names."""

    def __init__(self, indices: list[int]) -> None:
        self._indices, self._next = indices, 0

    def save_state_rank(self) -> int:
        return self._next

    def restore_state_rank(self, state: int) -> None:
        self._next = state

    def __iter__(self) -> Iterator[Sample]:
        while self._next < len(self._indices):
            index = self._indices[self._next]
            self._next += 1
            yield Sample(__key__=[f"shard/{index}"], tokens=np.full((1, index), index))


class Energon:
    """What somebody writes around such a loader: three lines that say what the feed calls things."""

    def __init__(self, loader: EnergonLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"tokens": one.tokens, "keys": one.__key__} for one in self._loader)

    def state_dict(self) -> int:
        return self._loader.save_state_rank()

    def load_state_dict(self, state: int) -> None:
        self._loader.restore_state_rank(state)


def energon(context: SourceContext) -> Energon:
    return Energon(EnergonLoader(shard(context)))


def transfer_queue(context: SourceContext) -> Iterator[dict[str, Any]]:
    """Batches that other processes put into a queue as they finish, in sizes nobody planned."""
    channel: queue.Queue[Any] = queue.Queue(maxsize=2)

    def produce() -> None:
        for index in shard(context):
            channel.put({"responses": np.full((index % 4 + 1, 5), index), "uid": [f"{index}"], "reward": index / 4})
        channel.put(None)

    threading.Thread(target=produce, daemon=True).start()
    while (batch := channel.get()) is not None:
        yield batch


SOURCES = {
    source.__name__: source
    for source in (
        generator_of_dicts,
        data_loader,
        stateful_data_loader,
        hugging_face_dataset,
        energon,
        transfer_queue,
    )
}
HELD_BY_RANK_0 = ("transfer_queue",)
"""Sources whose iterator one of the ranks already has; the others are read in a feeder."""
CAN_RESUME = ("stateful_data_loader", "energon")
