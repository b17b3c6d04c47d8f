"""Micro batches of a PackedTokens, opened for one shard: store + order + packing at work."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.errors import ConfigError
from headrace.feed.corpora import open_stores
from headrace.feed.packed_order import open_order
from headrace.feed.production import Metadata, Written
from headrace.order import (
    BalancedShard,
    Part,
    Shard,
    cost_of,
    laid_out_lengths,
    turn_of,
)
from headrace.packing import PackCounts, Packer
from headrace.spec import BatchSpec
from headrace.store import TokenStore

if TYPE_CHECKING:
    from headrace.feed.packed_tokens import PackedTokens


class PackedBatches:
    """Micro batch i of one shard, by number. Reads from disk on demand; used by one thread at a time."""

    def __init__(
        self,
        source: PackedTokens,
        *,
        data_rank: int,
        data_size: int,
        consumed_samples: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        source.check()
        dealing = source.dealing(data_size)
        turn = turn_of(state, dealing)
        self.source = source
        self.spec = source.batch_spec()
        self._packer = Packer(source.rules, layout=source.layout)
        with ExitStack() as resources:
            self._stores = open_stores(source.blend.prefixes, resources, walk_index=source.order != "elastic")
            if source.vocab_size is not None:
                for store in self._stores:
                    store.require_vocabulary(source.vocab_size)
            self._targets = open_stores(source.target_prefixes, resources)
            if self._targets:
                for tokens, targets in zip(self._stores, self._targets, strict=True):
                    _check_targets(tokens, targets)
            self._order = open_order(source, self._stores)
            self._resources = resources.pop_all()
        self._shard = Shard(micro_batch_size=source.micro_batch_size, data_rank=data_rank, data_size=data_size)
        self._consumed_samples = consumed_samples
        self._length = self._shard.num_micro_batches(len(self._order), consumed_samples=consumed_samples)
        self._balanced: BalancedShard | None = None
        if dealing is not None:
            self._balanced = BalancedShard(
                dealing,
                self._cost,
                data_rank=data_rank,
                num_samples=len(self._order),
                consumed_samples=consumed_samples,
                turn=turn,
            )
        shape = (source.micro_batch_size, source.rules.row_length(source.seq_length))
        # Rows that are not full hold pads, which uint16 may not.
        self._rows = np.empty(shape, _row_dtype(self._stores) if source.documents == "cut" else np.int32)
        self._target_rows = np.empty(shape, np.int32) if self._targets else None

    def __len__(self) -> int:
        """Micro batches left, the same number for every shard: an uneven rest is dropped, as by Megatron's sampler."""
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        """New arrays, which the caller owns, with `max_seqlen` and `num_documents` as ints. IndexError past the end."""
        arrays = {field.name: np.empty(field.shape, field.dtype) for field in self.spec.fields}
        counts = self.write(index, arrays)
        exact = {
            field.name: array[: counts.num_documents + 1] if field.ragged else array
            for field, array in zip(self.spec.fields, arrays.values(), strict=True)
        }
        return exact | {"max_seqlen": counts.max_seqlen, "num_documents": counts.num_documents}

    def samples(self, index: int) -> tuple[int, ...]:
        """Numbers of the samples in the rows of micro batch `index`."""
        if not 0 <= index < self._length:
            raise IndexError(f"micro batch {index} of {self._length}")
        if self._balanced is not None:
            return self._balanced.micro_batch(index)
        return tuple(self._shard.micro_batch(index, consumed_samples=self._consumed_samples))

    @property
    def num_samples(self) -> int:
        """Of the whole order, whoever takes them."""
        return len(self._order)

    def parts(self, index: int) -> list[Sequence[Part]]:
        """What the rows of micro batch `index` are made of."""
        return [self._order.parts(sample) for sample in self.samples(index)]

    def consumed_after(self, index: int) -> int:
        """Samples of the whole job that are consumed once every shard has taken its micro batch `index`."""
        return self._consumed_samples + (index + 1) * self._shard.samples_per_turn

    def state_after(self, index: int) -> dict[str, Any] | None:
        """What a checkpoint needs beside that number: None, except inside a balanced step."""
        return None if self._balanced is None else self._balanced.state_after(index)

    def _cost(self, sample: int) -> int:
        segments = laid_out_lengths(
            self._order.parts(sample),
            sequence_length=self.source.seq_length,
            extra=int(self.source.add_extra_token),
            pad_documents_to=self.source.pad_documents_to,
        )
        return cost_of(segments, self.source.attention_cost)

    def write(self, index: int, arrays: Mapping[str, np.ndarray]) -> PackCounts:
        """Read, pack and write micro batch `index` into arrays of `spec`, at full capacity."""
        parts = self.parts(index)
        lengths = self._read(self._stores, self._rows, parts)
        if self._target_rows is not None:
            self._read(self._targets, self._target_rows, parts)
        counts = self._packer.pack_into(
            self._rows,
            arrays,
            document_lengths=lengths if self.source.boundaries == "documents" else None,
            targets=self._target_rows,
        )
        if self.source.pad_documents_to > 1:
            true_lengths = (sum(part.length for part in row_parts) for row_parts in parts)
            return counts._replace(num_valid_tokens=sum(min(n, self.source.seq_length) for n in true_lengths))
        return counts

    def _read(self, stores: Sequence[TokenStore], rows: np.ndarray, parts: Sequence[Sequence[Part]]) -> list[list[int]]:
        """Fill rows with their parts, each padded as the source says; the padded lengths of each row."""
        multiple, pad = self.source.pad_documents_to, self._packer.rules.effective_pad
        if self.source.documents == "whole":
            rows.fill(pad)
        lengths = []
        for row, row_parts in zip(rows, parts, strict=True):
            starts, filled = [], 0
            for part in row_parts:
                starts.append(filled)
                stores[part.corpus].read_into(row[filled:], part.document, part.offset, part.length)
                filled = min(filled - (-part.length // multiple) * multiple, len(row))
            lengths.append(np.diff([*starts, filled]).tolist())
        return lengths

    def close(self) -> None:
        self._resources.close()


class PackedProduction:
    """See headrace.feed.production.Production."""

    def __init__(self, batches: PackedBatches) -> None:
        self._batches = batches
        self._index = -1

    def advance(self) -> BatchSpec | None:
        self._index += 1
        return self._batches.spec if self._index < len(self._batches) else None

    def write(self, arrays: Mapping[str, np.ndarray]) -> Written:
        counts = self._batches.write(self._index, arrays)
        state = self._batches.state_after(self._index)
        return Written(
            consumed_samples=self._batches.consumed_after(self._index),
            max_seqlen=counts.max_seqlen,
            num_documents=counts.num_documents,
            num_loss_tokens=counts.num_loss_tokens,
            num_valid_tokens=counts.num_valid_tokens,
            lengths=(counts.num_documents + 1,),
            metadata=Metadata(
                samples=self._batches.samples(self._index),
                source_state=None if state is None else pickle.dumps(state),
            ),
        )

    def close(self) -> None:
        self._batches.close()


def _check_targets(tokens: TokenStore, targets: TokenStore) -> None:
    if not np.array_equal(tokens.lengths, targets.lengths):
        raise ConfigError(
            f"targets must be as long as the tokens, document by document: {len(tokens)} sequences of "
            f"{tokens.num_tokens:,} tokens, {len(targets)} of {targets.num_tokens:,} targets"
        )
    if not np.can_cast(targets.dtype, np.int32, "safe"):
        raise ConfigError(f"targets must fit int32, the store holds {targets.dtype}")


def _row_dtype(stores: Sequence[TokenStore]) -> np.dtype[Any]:
    """What packing takes as it lies, or what it would make of the rest, such as a blend of two dtypes."""
    dtypes = {store.dtype for store in stores}
    return dtypes.pop() if dtypes in ({np.dtype(np.uint16)}, {np.dtype(np.int32)}) else np.dtype(np.int32)
