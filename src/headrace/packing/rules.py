"""What the user decides about a packed batch: which tokens mean what, and which flags of Megatron are set.

Names and meanings are those of Megatron-LM's GPTDataset (megatron/core/datasets/gpt_dataset.py), so that a
configuration may be carried over flag by flag.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.arguments import whole_number
from headrace.errors import ConfigError

# Megatron's stand-in where the tokenizer has no pad of its own (`_PAD_TOKEN_ID`): no real token has this id.
NO_PAD = -1

MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PackRules:
    """How token rows become fields. Raises ConfigError for a combination that has no meaning."""

    eod: int | None = None
    """End-of-document id. It belongs to the document it ends. None: the text has none."""
    pad: int | None = None
    """The tokenizer's pad id. As a label it is never a target; as a token or label it is delivered as 0, also where
    it is an id of the vocabulary. None: nothing is padding except -1."""
    reset_position_ids: bool = False
    """Position ids start again at 0 after each end of document."""
    reset_attention_mask: bool = False
    """Attention ends with the document: `cu_seqlens` has one segment per document instead of one per row."""
    eod_mask_loss: bool = False
    """What follows an end-of-document token is no target: nobody can predict the next document."""
    add_extra_token: bool = True
    """Rows hold seq_length + 1 tokens, the last one only a label. False: seq_length tokens, the last one without a
    label (it gets the pad, so it is no target)."""
    allow_ambiguous_pad_tokens: bool = False
    """`pad` may equal `eod`. Then no end of document is ever a target, and all are delivered as 0. Unless this is
    set, a pad that equals `eod` is ignored and -1 takes its place."""
    vocab_size: int | None = None
    """Ids must lie in [0, vocab_size); pads are exempt, they never reach the model. None: not checked."""

    def __post_init__(self) -> None:
        for name, value, lowest in (("eod", self.eod, 0), ("pad", self.pad, NO_PAD)):
            if value is not None and not lowest <= whole_number(name, value) <= MAX_TOKEN_ID:
                raise ConfigError(f"{name} must be a token id in [{lowest}, 2**31) or None, got {value}")
        if self.vocab_size is not None and not 1 <= whole_number("vocab_size", self.vocab_size) <= MAX_TOKEN_ID + 1:
            raise ConfigError(f"vocab_size must be in [1, 2**31], got {self.vocab_size}")
        if self.eod is None:
            if self.eod_mask_loss:
                raise ConfigError("eod_mask_loss needs `eod`, the end-of-document id, got None")
        elif self.vocab_size is not None and self.eod >= self.vocab_size:
            raise ConfigError(
                f"eod {self.eod} is outside the vocabulary: `vocab_size` must be above it, got {self.vocab_size}"
            )

    @property
    def effective_pad(self) -> int:
        """The id that counts as padding: `pad`, or -1 where there is none that could be told from `eod`."""
        if self.pad is None or (self.pad == self.eod and not self.allow_ambiguous_pad_tokens):
            return NO_PAD
        return self.pad

    @property
    def ends_at_eod(self) -> bool:
        """Whether end-of-document tokens restart positions or cut attention."""
        return self.reset_position_ids or self.reset_attention_mask

    def row_length(self, seq_length: int) -> int:
        """Tokens in a row that gives `seq_length` positions."""
        return seq_length + self.add_extra_token
