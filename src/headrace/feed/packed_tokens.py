"""Token stores as a source: store + order + packing, composed.

Used by the feeder, which writes straight into slots, and by whoever wants the same batches without a feed:

    batches = PackedTokens("corpus", seq_length=4096).open_batches()
    batches[0]["tokens"]                                            # int64 [micro_batch_size, seq_length]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Self

from headrace.arguments import whole_number
from headrace.errors import ConfigError
from headrace.feed.corpora import Blend, Corpora, fingerprints, read_corpora, read_data_path
from headrace.feed.packed_batches import PackedBatches, PackedProduction
from headrace.feed.source import SourceContext
from headrace.order import DEFAULT_ATTENTION_COST, Dealing, OrderRules
from headrace.packing import PackRules, batch_spec
from headrace.position import MAX_COUNT
from headrace.spec import BatchSpec


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Micro batches of packed documents from Megatron `.bin/.idx` pairs. Small and picklable; opens nothing by itself.

    Samples and their order are those of Megatron's GPTDataset, or BlendedDataset for a blend, for the same arguments,
    unless `order`, `documents` or `balance` say otherwise.
    """

    prefix: Corpora
    """Path of the pair without `.bin` or `.idx`. Or a blend, whose samples each come from one corpus: by weight, which
    needs num_samples, as [(0.7, "wiki"), (0.3, "code")]; or ["wiki", "code"], from each as many as it has."""
    _: KW_ONLY
    seq_length: int
    micro_batch_size: int = 1
    """Rows per batch."""
    seed: int = 1234
    num_epochs: int = 1
    """How often the corpus is read, each time in another order, where num_samples does not say how far."""
    num_samples: int | None = None
    """Samples of the whole job (Megatron's train_iters x global batch size); the corpus is repeated as Megatron does,
    which shuffles its epochs together: another number is another order. Not so with order="elastic" or whole documents,
    where it only says where to end."""
    split: str | None = None
    """Weights of train, valid and test such as "969,30,1". None: the whole corpus."""
    split_name: str = "train"
    """Which part of `split`."""
    order: str = "megatron"
    """What decides which tokens make which sample: "megatron" is GPTDataset's order. "elastic" is computed instead of
    built (headrace.order.elastic): no memory, no start, no other order for another run length."""
    balance: Literal["none", "dp"] = "none"
    """With "dp" the samples of an optimizer step are dealt out to data ranks and micro batches by cost, so that no rank
    waits for another's long documents (headrace.order.balance). The same samples in each step."""
    micro_batches_per_step: int = 1
    """With balance: micro batches that each data rank takes per optimizer step."""
    attention_cost: float = DEFAULT_ATTENTION_COST
    """With balance: a row costs tokens + attention_cost * sum of s^2 over its documents. About 1 / (12 * hidden size),
    or as headrace.order.measured_attention_cost finds."""
    boundaries: str = "documents"
    """Where attention and positions begin anew: "documents", at the ends of the documents a row is made of; or "eod",
    after `eod` tokens and as the two reset flags say, which is Megatron's way."""
    documents: Literal["cut", "whole"] = "cut"
    """Megatron's way is "cut": rows are full, and documents are cut where a row ends. "whole": none is cut unless it is
    longer than a row (headrace.order.best_fit); what is left of a row is padding."""
    pad_documents_to: int = 1
    """With whole documents: each takes a multiple of so many tokens. 2 * cp_size, and a view by documents needs no
    padding of its own: every rank's part has one length."""
    targets: str | Sequence[str] | None = None
    """Path of a second pair, as long document by document, that holds the target of each token: -100 for nothing, as in
    prompts (headrace.packing.supervised). With a blend one for each corpus. None: every token is the target of the one
    before."""
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

    @classmethod
    def from_data_path(cls, words: str | Sequence[str], **settings: Any) -> Self:
        """Of what Megatron's `--data-path` says: "30 wiki 70 code", prefixes without weights, or one."""
        return cls(read_data_path(words), **settings)

    @property
    def blend(self) -> Blend:
        """The corpora and their weights. ConfigError for what is none."""
        return read_corpora(self.prefix)

    @property
    def target_prefixes(self) -> tuple[str, ...]:
        """Those of `targets`, one for each corpus; empty without."""
        if self.targets is None:
            return ()
        return (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)

    @property
    def is_computed(self) -> bool:
        """Sample i is the same however many there are: what Megatron's own order is not."""
        return self.order == "elastic" or self.documents == "whole"

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

    @property
    def order_rules(self) -> OrderRules:
        """The part that the order needs. ConfigError for what no order has."""
        return OrderRules(
            sequence_length=self.seq_length,
            seed=self.seed,
            num_samples=self.num_samples,
            split=self.split,
            split_name=self.split_name,
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

    def check(self) -> None:
        """ConfigError for what contradicts itself, whatever the corpus holds."""
        for name in ("seq_length", "micro_batch_size", "num_epochs", "micro_batches_per_step"):
            if (number := whole_number(name, getattr(self, name))) < 1:
                raise ConfigError(f"{name} must be at least 1, got {number}")
            _check_count(name, number)
        whole_number("seed", self.seed)
        if self.num_samples is not None:
            _check_count("num_samples", whole_number("num_samples", self.num_samples))
        choices = {
            "order": ("megatron", "elastic"),
            "boundaries": ("documents", "eod"),
            "documents": ("cut", "whole"),
            "balance": ("none", "dp"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        self._check_blend()
        if self.boundaries != "documents" and (self.documents == "whole" or self.targets is not None):
            raise ConfigError(f"whole documents and targets need boundaries='documents', got {self.boundaries!r}")
        if self.boundaries != "documents" and self.balance != "none":
            raise ConfigError(
                f"balance={self.balance!r} goes by the lengths of documents and needs boundaries='documents', got "
                f"{self.boundaries!r}"
            )
        if self.balance == "none" and self.micro_batches_per_step != 1:
            raise ConfigError(
                f"micro_batches_per_step={self.micro_batches_per_step} is dealt out together, which needs balance='dp'"
            )
        if self.documents == "whole" and self.order == "elastic":
            raise ConfigError("order='elastic' cuts documents where a row ends: it needs documents='cut', got 'whole'")
        if self.documents == "cut" and self.pad_documents_to != 1:
            raise ConfigError(
                f"pad_documents_to={self.pad_documents_to} needs documents='whole': where a row ends, a cut document "
                "has no room for padding"
            )
        _ = self.batch_spec(), self.rules, self.order_rules  # each refuses what means nothing to it

    def _check_blend(self) -> None:
        blend = self.blend
        if blend.weights is not None and self.num_samples is None:
            raise ConfigError(
                f"a blend by weight ends nowhere by itself: give num_samples, the samples of the whole job, got None "
                f"and {len(blend.prefixes)} corpora"
            )
        if self.num_epochs > 1 and (blend.weights is not None or not (blend.is_one_corpus or self.is_computed)):
            raise ConfigError(
                f"num_epochs={self.num_epochs} is not for this blend of {len(blend.prefixes)} corpora: give num_samples"
            )
        if self.targets is not None and len(self.target_prefixes) != len(blend.prefixes):
            raise ConfigError(
                f"targets must name one pair for each corpus: {len(blend.prefixes)} corpora, got "
                f"{len(self.target_prefixes)}"
            )

    def identity(self) -> str:
        """What a checkpoint remembers: what decides which sample is which. Neither the micro batch nor the layout."""
        rows = "" if self.documents == "cut" else f", whole documents padded to {self.pad_documents_to}"
        targets = "".join(f", targets {digits}" for digits in fingerprints(self.target_prefixes))
        # Only Megatron's samples depend on how many there are; any other run may be continued with more.
        run = "" if self.is_computed or self.num_samples is None else f"num_samples {self.num_samples}, "
        return (
            f"{self.blend.identity()}{targets}, order {self.order}, seq_length {self.seq_length}, seed {self.seed}, "
            f"{run}split {self.split} ({self.split_name}), extra token {self.add_extra_token}{rows}"
        )

    def open_batches(
        self,
        *,
        data_rank: int = 0,
        data_size: int = 1,
        consumed_samples: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> PackedBatches:
        """The micro batches of one shard. Opens the store and builds the order: seconds for a very large corpus, or
        milliseconds for any if the order is elastic.

        `state`: what PackedBatches.state_after gave at `consumed_samples`, None unless inside a balanced step.
        """
        return PackedBatches(
            self, data_rank=data_rank, data_size=data_size, consumed_samples=consumed_samples, state=state
        )

    def open_production(
        self, *, data_rank: int, data_size: int, consumed_samples: int, state: Mapping[str, Any] | None = None
    ) -> PackedProduction:
        """The same for a feed's producer."""
        return PackedProduction(
            self.open_batches(data_rank=data_rank, data_size=data_size, consumed_samples=consumed_samples, state=state)
        )

    def dealing(self, data_size: int) -> Dealing | None:
        """How a step is dealt out among so many data ranks; None without balance."""
        if self.balance == "none":
            return None
        return Dealing(
            data_size=data_size,
            micro_batches_per_step=self.micro_batches_per_step,
            micro_batch_size=self.micro_batch_size,
            attention_cost=self.attention_cost,
        )

    def __call__(self, context: SourceContext) -> Iterator[dict[str, Any]]:
        """As any other source: the dicts of one shard from its beginning."""
        batches = self.open_batches(data_rank=context.data_rank, data_size=context.data_size)
        return (batches[index] for index in range(len(batches)))


def _check_count(name: str, number: int) -> None:
    if number > MAX_COUNT:
        raise ConfigError(f"{name} must be below 2**63, got a number of {number.bit_length()} bits")
