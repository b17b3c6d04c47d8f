"""A token store as a source: store + order + packing, composed.

Used by the feeder, which writes straight into slots, and by whoever wants the same batches without a feed:

    batches = PackedTokens("corpus", seq_length=4096).open_batches()
    batches[0]["tokens"]                                            # int64 [micro_batch_size, seq_length]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from headrace.errors import ConfigError
from headrace.feed.production import Metadata, Written
from headrace.feed.source import SourceContext
from headrace.order import EpochOrder, MegatronOrder, OrderRules, SampleOrder, Shard
from headrace.packing import PackCounts, Packer, PackRules, batch_spec
from headrace.spec import BatchSpec
from headrace.store import TokenStore


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Micro batches of packed documents from a Megatron `.bin/.idx` pair. Small and picklable; opens nothing by itself.

    Samples and their order are those of Megatron's GPTDataset for the same arguments.
    """

    prefix: str
    """Path of the pair without `.bin` or `.idx`."""
    _: KW_ONLY
    seq_length: int
    micro_batch_size: int = 1
    """Rows per batch."""
    seed: int = 1234
    num_epochs: int = 1
    """How often the corpus is read, each time in another order, where num_samples does not say how far."""
    num_samples: int | None = None
    """Samples of the whole job (Megatron's train_iters x global batch size); the corpus is repeated as Megatron does,
    which shuffles its epochs together: another number is another order."""
    split: str | None = None
    """Weights of train, valid and test such as "969,30,1". None: the whole corpus."""
    split_name: str = "train"
    """Which part of `split`."""
    order: str = "megatron"
    """What decides which tokens make which sample: "megatron" is GPTDataset's order."""
    boundaries: str = "documents"
    """Where attention and positions begin anew: "documents", at the ends of the documents a row is made of; or "eod",
    after `eod` tokens and as the two reset flags say, which is Megatron's way."""
    layout: str = "megatron"
    """What the fields are called and what labels mean: "megatron", "transformers" or "torchtitan"."""
    eod: int | None = None
    pad: int | None = None
    vocab_size: int | None = None
    reset_position_ids: bool = True
    reset_attention_mask: bool = True
    eod_mask_loss: bool = False
    add_extra_token: bool = True

    @property
    def rules(self) -> PackRules:
        """The part that packing needs. ConfigError for flags that contradict each other."""
        return PackRules(
            eod=self.eod,
            pad=self.pad,
            vocab_size=self.vocab_size,
            reset_position_ids=self.reset_position_ids,
            reset_attention_mask=self.reset_attention_mask,
            eod_mask_loss=self.eod_mask_loss,
            add_extra_token=self.add_extra_token,
        )

    def batch_spec(self) -> BatchSpec:
        """The fields of a batch at full capacity."""
        return batch_spec(self.layout, self.micro_batch_size, self.seq_length)

    def identity(self) -> str:
        """What a checkpoint remembers: what decides which sample is which. Neither the micro batch nor the layout."""
        with TokenStore(self.prefix) as store:
            corpus = store.fingerprint()
        return (
            f"corpus {corpus}, order {self.order}, seq_length {self.seq_length}, seed {self.seed}, "
            f"num_epochs {self.num_epochs}, num_samples {self.num_samples}, split {self.split} ({self.split_name}), "
            f"extra token {self.add_extra_token}"
        )

    def open_batches(self, *, data_rank: int = 0, data_size: int = 1, consumed_samples: int = 0) -> PackedBatches:
        """The micro batches of one shard. Opens the store and builds the order: seconds for a very large corpus."""
        return PackedBatches(self, data_rank=data_rank, data_size=data_size, consumed_samples=consumed_samples)

    def open_production(self, *, data_rank: int, data_size: int, consumed_samples: int) -> PackedProduction:
        """The same for a feed's producer."""
        return PackedProduction(
            self.open_batches(data_rank=data_rank, data_size=data_size, consumed_samples=consumed_samples)
        )

    def __call__(self, context: SourceContext) -> Iterator[dict[str, Any]]:
        """As any other source: the dicts of one shard from its beginning."""
        batches = self.open_batches(data_rank=context.data_rank, data_size=context.data_size)
        return (batches[index] for index in range(len(batches)))


class PackedBatches:
    """Micro batch i of one shard, by number. Reads from disk on demand; used by one thread at a time."""

    def __init__(self, source: PackedTokens, *, data_rank: int, data_size: int, consumed_samples: int) -> None:
        _check(source)
        self.source = source
        self.spec = source.batch_spec()
        self._packer = Packer(source.rules, layout=source.layout)
        self._store = TokenStore(source.prefix)
        try:
            if source.vocab_size is not None:
                self._store.require_vocabulary(source.vocab_size)
            self._order = _open_order(source, self._store)
        except BaseException:
            self._store.close()
            raise
        self._shard = Shard(micro_batch_size=source.micro_batch_size, data_rank=data_rank, data_size=data_size)
        self._consumed_samples = consumed_samples
        self._length = self._shard.num_micro_batches(len(self._order), consumed_samples=consumed_samples)
        row_length = source.rules.row_length(source.seq_length)
        self._rows = np.empty((source.micro_batch_size, row_length), _row_dtype(self._store.dtype))

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
        return tuple(self._shard.micro_batch(index, consumed_samples=self._consumed_samples))

    def consumed_after(self, index: int) -> int:
        """Samples of the whole job that are consumed once every shard has taken its micro batch `index`."""
        return self._consumed_samples + (index + 1) * self._shard.samples_per_turn

    def write(self, index: int, arrays: Mapping[str, np.ndarray]) -> PackCounts:
        """Read, pack and write micro batch `index` into arrays of `spec`, at full capacity."""
        parts = [self._order.parts(sample) for sample in self.samples(index)]
        for row, row_parts in zip(self._rows, parts, strict=True):
            filled = 0  # ends at the row's end: partial samples are left out by these rules
            for part in row_parts:
                filled += self._store.read_into(row[filled:], part.document, part.offset, part.length)
        lengths = None
        if self.source.boundaries == "documents":
            lengths = [[part.length for part in row_parts] for row_parts in parts]
        return self._packer.pack_into(self._rows, arrays, document_lengths=lengths)

    def close(self) -> None:
        self._store.close()


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
        return Written(
            consumed_samples=self._batches.consumed_after(self._index),
            max_seqlen=counts.max_seqlen,
            num_documents=counts.num_documents,
            num_loss_tokens=counts.num_loss_tokens,
            num_valid_tokens=counts.num_valid_tokens,
            lengths=(counts.num_documents + 1,),
            metadata=Metadata(samples=self._batches.samples(self._index)),
        )

    def close(self) -> None:
        self._batches.close()


def _check(source: PackedTokens) -> None:
    for name in ("seq_length", "micro_batch_size", "num_epochs"):
        if getattr(source, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(source, name)}")
    for name, known in (("order", ("megatron",)), ("boundaries", ("documents", "eod"))):
        if getattr(source, name) not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(source, name)!r}")


def _open_order(source: PackedTokens, store: TokenStore) -> SampleOrder:
    rules = OrderRules(
        sequence_length=source.seq_length,
        seed=source.seed,
        num_samples=source.num_samples,
        split=source.split,
        split_name=source.split_name,
        add_extra_token=source.add_extra_token,
    )
    if source.num_epochs > 1:
        return EpochOrder(store.lengths, rules, num_epochs=source.num_epochs)
    return MegatronOrder(store.lengths, rules)


def _row_dtype(stored: np.dtype[Any]) -> np.dtype[Any]:
    """What packing takes as it lies, or what it would make of the rest."""
    return stored if stored in (np.uint16, np.int32) else np.dtype(np.int32)
