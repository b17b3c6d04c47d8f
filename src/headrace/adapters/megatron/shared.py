"""The ring of one tensor-parallel group, through which every micro batch of its ranks goes.

One ring for training, validation, test and all chunks of layers: the ranks of a group ask for batches in one sequence,
as they must for broadcasts, so the rank that reads takes each batch from the iterator it was just given, and the others
take what comes. It reads when it is asked, not ahead: Megatron's RerunDataIterator can rewind, and what it replays goes
through the ring once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from headrace.adapters.megatron.feeder import FeedIterator
from headrace.adapters.megatron.fields import FromRing, Rules, to_ring
from headrace.adapters.megatron.objections import Objections
from headrace.adapters.megatron.stages import Here
from headrace.errors import ConfigError, SourceError
from headrace.torch import Feed


class SharedBatches:
    """Made at the first micro batch, by all ranks of the group. Used by one thread."""

    def __init__(self, where: Here, rules: Rules) -> None:
        self.where, self.rules = where, rules
        self._reading: Any = None
        self._num_read = 0
        self._feed: Feed | None = None
        self._from_ring = FromRing(where.device)
        self._objections = Objections(where.ranks)

    def take(self, data_iterator: Any) -> dict[str, Any]:
        """The next micro batch: Megatron's keys and `boundaries`. Blocks until it is there.

        `data_iterator` is what Megatron passes: an iterator on the rank that reads (the group's first), None on the
        others; or a FeedIterator on every rank. Tensors are valid while `where.in_flight` more are taken. ConfigError,
        on every rank, if another rank has the iterator (later than at the first batch: a few batches after it) or a
        batch is not what the run says; SourceError if the iterator raises or ends.
        """
        if isinstance(getattr(data_iterator, "iterable", data_iterator), FeedIterator):
            return self._from_ring.take_host(next(data_iterator), self.rules)
        if self._feed is None:
            self._feed = self._make_feed(data_iterator)
        elif data_iterator is not None and self.where.tp_rank > 0:
            self._objections.raise_one(
                f"only rank {self.where.ranks[0]} reads for the tensor-parallel group {list(self.where.ranks)}, but "
                f"rank {self.where.ranks[self.where.tp_rank]} was given a data iterator too: pass None there"
            )
        self._reading = data_iterator
        try:
            return self._from_ring.take(next(self._feed))
        finally:
            self._reading = None

    def _make_feed(self, data_iterator: Any) -> Feed:
        hold = self.where.in_flight
        return Feed(
            iterator=None if data_iterator is None else self._read(),
            writer_rank=0,
            group=list(self.where.ranks) if torch.distributed.is_initialized() else None,
            data_rank=self.where.dp_rank,
            data_size=self.where.dp_size,
            device=self.where.device,
            hold=hold,
            num_slots=hold + 3,
        )

    def _read(self) -> Iterator[dict[str, Any]]:
        """What the ring's producer draws, on the rank that reads: one item per `take`."""
        while True:
            who, number = f"rank {self.where.ranks[0]}", self._num_read
            if len(self.where.ranks) > 1 and (objection := self._objections.heard()) is not None:
                raise ConfigError(objection)
            if self._reading is None:
                raise ConfigError(
                    f"{who} reads for the tensor-parallel group {list(self.where.ranks)}, but was given no data "
                    f"iterator for micro batch {number}"
                )
            try:
                item = next(self._reading)
            except StopIteration:
                raise SourceError(
                    f"the data iterator of {who} ended before micro batch {number}: it holds fewer micro batches than "
                    "the run takes; lower --train-iters (or --eval-iters), or give it more data"
                ) from None
            self._num_read += 1
            yield to_ring(item, self.rules, number)
