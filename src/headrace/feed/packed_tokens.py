"""A token store as a source: store + order + packing, composed.

Used by the feeder, which writes straight into slots, and by whoever wants the same batches without a feed:

    batches = PackedTokens("corpus", seq_length=4096).open_batches()
    batches[0]["tokens"]                                            # int64 [micro_batch_size, seq_length]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np

from headrace.errors import ConfigError
from headrace.feed.production import Metadata, Written
from headrace.feed.source import SourceContext
from headrace.order import BestFitOrder, EpochOrder, MegatronOrder, OrderRules, Part, SampleOrder, Shard
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
    documents: Literal["cut", "whole"] = "cut"
    """Megatron's way is "cut": rows are full, and documents are cut where a row ends. "whole": none is cut unless it is
    longer than a row (headrace.order.best_fit); what is left of a row is padding, and num_samples stays None."""
    pad_documents_to: int = 1
    """With whole documents: each takes a multiple of so many tokens. 2 * cp_size, and a view by documents needs no
    padding of its own: every rank's part has one length."""
    targets: str | None = None
    """Path of a second pair, as long document by document, that holds the target of each token: -100 for nothing, as in
    prompts (headrace.packing.supervised). None: every token is the target of the one before."""
    layout: str = "megatron"
    """What the fields are called and what labels mean: "megatron", "transformers" or "torchtitan"."""
    flatten: bool = False
    """Several rows as one: [1, micro_batch_size * seq_length]."""
    attention_mask: Literal["none", "dense"] = "none"
    """With "dense" a bool mask [B, 1, S, S] as well, refused where it would need more than 256 MiB."""
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
        return batch_spec(
            self.layout,
            self.micro_batch_size,
            self.seq_length,
            flatten=self.flatten,
            attention_mask=self.attention_mask,
        )

    def identity(self) -> str:
        """What a checkpoint remembers: what decides which sample is which. Neither the micro batch nor the layout."""
        with TokenStore(self.prefix) as store:
            corpus = store.fingerprint()
        rows = "" if self.documents == "cut" else f", whole documents padded to {self.pad_documents_to}"
        return (
            f"corpus {corpus}, order {self.order}, seq_length {self.seq_length}, seed {self.seed}, "
            f"num_epochs {self.num_epochs}, num_samples {self.num_samples}, split {self.split} ({self.split_name}), "
            f"extra token {self.add_extra_token}{rows}"
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
        self._targets: TokenStore | None = None
        self._store = TokenStore(source.prefix)
        try:
            if source.vocab_size is not None:
                self._store.require_vocabulary(source.vocab_size)
            if source.targets is not None:
                self._targets = TokenStore(source.targets)
                _check_targets(self._store, self._targets)
            self._order = _open_order(source, self._store)
        except BaseException:
            self.close()
            raise
        self._shard = Shard(micro_batch_size=source.micro_batch_size, data_rank=data_rank, data_size=data_size)
        self._consumed_samples = consumed_samples
        self._length = self._shard.num_micro_batches(len(self._order), consumed_samples=consumed_samples)
        shape = (source.micro_batch_size, source.rules.row_length(source.seq_length))
        # Rows that are not full hold pads, which uint16 may not.
        self._rows = np.empty(shape, _row_dtype(self._store.dtype) if source.documents == "cut" else np.int32)
        self._target_rows = None if self._targets is None else np.empty(shape, np.int32)

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
        lengths = self._read(self._store, self._rows, parts)
        if self._targets is not None and self._target_rows is not None:
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

    def _read(self, store: TokenStore, rows: np.ndarray, parts: Sequence[Sequence[Part]]) -> list[list[int]]:
        """Fill rows with their parts, each padded as the source says; the padded lengths of each row."""
        multiple, pad = self.source.pad_documents_to, self._packer.rules.effective_pad
        if self.source.documents == "whole":
            rows.fill(pad)
        lengths = []
        for row, row_parts in zip(rows, parts, strict=True):
            starts, filled = [], 0
            for part in row_parts:
                starts.append(filled)
                store.read_into(row[filled:], part.document, part.offset, part.length)
                filled = min(filled - (-part.length // multiple) * multiple, len(row))
            lengths.append(np.diff([*starts, filled]).tolist())
        return lengths

    def close(self) -> None:
        self._store.close()
        if self._targets is not None:
            self._targets.close()


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
    choices = {"order": ("megatron",), "boundaries": ("documents", "eod"), "documents": ("cut", "whole")}
    for name, known in choices.items():
        if getattr(source, name) not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(source, name)!r}")
    if source.boundaries != "documents" and (source.documents == "whole" or source.targets is not None):
        raise ConfigError(f"whole documents and targets need boundaries='documents', got {source.boundaries!r}")
    if source.documents == "cut" and source.pad_documents_to != 1:
        raise ConfigError(
            f"pad_documents_to={source.pad_documents_to} needs documents='whole': where a row ends, a cut document has "
            "no room for padding"
        )


def _check_targets(tokens: TokenStore, targets: TokenStore) -> None:
    if not np.array_equal(tokens.lengths, targets.lengths):
        raise ConfigError(
            f"targets must be as long as the tokens, document by document: {len(tokens)} sequences of "
            f"{tokens.num_tokens:,} tokens, {len(targets)} of {targets.num_tokens:,} targets"
        )
    if not np.can_cast(targets.dtype, np.int32, "safe"):
        raise ConfigError(f"targets must fit int32, the store holds {targets.dtype}")


def _open_order(source: PackedTokens, store: TokenStore) -> SampleOrder:
    rules = OrderRules(
        sequence_length=source.seq_length,
        seed=source.seed,
        num_samples=source.num_samples,
        split=source.split,
        split_name=source.split_name,
        add_extra_token=source.add_extra_token,
    )
    if source.documents == "whole":
        return BestFitOrder(
            store.lengths, rules, num_epochs=source.num_epochs, pad_documents_to=source.pad_documents_to
        )
    if source.num_epochs > 1:
        return EpochOrder(store.lengths, rules, num_epochs=source.num_epochs)
    return MegatronOrder(store.lengths, rules)


def _row_dtype(stored: np.dtype[Any]) -> np.dtype[Any]:
    """What packing takes as it lies, or what it would make of the rest."""
    return stored if stored in (np.uint16, np.int32) else np.dtype(np.int32)
