"""The rules of an order and the sizes that follow from them, before anything is shuffled.

Epochs and samples as in GPTDataset (megatron/core/datasets/gpt_dataset.py, 0.16.1). Where Megatron loops for ever (a
part without documents, an epoch without tokens) or delivers nothing, there is a ConfigError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.order.split import SPLIT_NAMES, split_range

IntArray = npt.NDArray[Any]

# Megatron's threshold: the last epoch is shuffled apart if less than this share of it is needed.
_SEPARATE_BELOW = 0.80
_MAX_SEQUENCE_LENGTH = 2**31 - 2


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderRules:
    """What decides the order of samples. Names are those of GPTDatasetConfig where it has one."""

    sequence_length: int
    """Tokens the model sees per sample."""
    seed: int = 1234
    """Megatron's `random_seed`; 0 to 2**32 - 1."""
    num_samples: int | None = None
    """Samples wanted; the corpus is repeated until they are there, so there may be more. None: one epoch. Another
    number is another order: the epochs are shuffled together."""
    split: str | None = None
    """Weights of train, valid and test such as "969,30,1". None: all documents (Megatron's one corpus per split)."""
    split_name: str = "train"
    """Which part of `split`."""
    add_extra_token: bool = True
    """Samples have one token more than `sequence_length`, shared with the next one, so that labels need no padding."""
    drop_last_partial: bool = True
    """Leave out a last sample that is not full. False is Megatron's `drop_last_partial_validation_sequence=False`,
    which it allows for "valid" only."""

    def __post_init__(self) -> None:
        if not 1 <= self.sequence_length <= _MAX_SEQUENCE_LENGTH:
            raise ConfigError(f"`sequence_length` must be 1 to {_MAX_SEQUENCE_LENGTH}, got {self.sequence_length}")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"`seed` must be 0 to {2**32 - 1}, got {self.seed}")
        if self.num_samples is not None and self.num_samples < 0:
            raise ConfigError(f"`num_samples` must not be negative, got {self.num_samples}")
        if self.split_name not in SPLIT_NAMES:
            raise ConfigError(f"`split_name` must be one of {', '.join(SPLIT_NAMES)}, got {self.split_name!r}")
        if not self.drop_last_partial and self.split_name != "valid":
            raise ConfigError(f"a last partial sample is kept for valid only, `split_name` is {self.split_name!r}")

    @property
    def extra(self) -> int:
        """1 if samples have one token more than `sequence_length`, else 0."""
        return int(self.add_extra_token)


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderPlan:
    """The sizes that follow from the rules and the lengths of the documents, before anything is shuffled."""

    documents: range
    tokens_per_epoch: int
    num_epochs: int
    num_samples: int
    """Samples there will be, at least as many as were asked for."""
    last_epoch_apart: bool
    """The last epoch is shuffled by itself, documents and samples."""
    num_first_samples: int
    """Samples of the epochs before it; all if it is not shuffled by itself."""

    @property
    def num_documents(self) -> int:
        """Entries of the document index: documents times epochs."""
        return len(self.documents) * self.num_epochs


class IndexArrays(NamedTuple):
    """Megatron's three arrays. Owned by the order; read-only by convention."""

    document_index: npt.NDArray[np.int32]
    sample_index: IntArray
    shuffle_index: IntArray


def plan_order(lengths: npt.NDArray[np.int32], rules: OrderRules) -> OrderPlan:
    """How many epochs and samples; raises ConfigError where there are none."""
    documents = split_range(len(lengths), rules.split, rules.split_name)
    tokens_per_epoch = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
    step, extra = rules.sequence_length, rules.extra
    num_epochs = 1
    if rules.num_samples is not None and tokens_per_epoch > 0:
        num_epochs = max(1, -(-(rules.num_samples * step + extra) // tokens_per_epoch))
    tokens = num_epochs * tokens_per_epoch - extra
    num_samples = tokens // step if rules.drop_last_partial else _ceil_in_float32(tokens, step)
    if tokens_per_epoch == 0 or num_samples < 1:
        raise ConfigError(
            f"one sample needs {step + extra} tokens, this part of the corpus holds {tokens_per_epoch} "
            f"(documents: {len(documents)}); "
            "lower `sequence_length`, take a larger corpus, or ask for `num_samples` to repeat this one"
        )
    last_epoch_apart, num_first_samples = False, num_samples
    if num_epochs > 1 and rules.num_samples is not None:
        without_last = ((num_epochs - 1) * tokens_per_epoch - extra) // step
        per_epoch = (tokens_per_epoch - extra) // step
        last_epoch_apart = rules.num_samples - without_last < int(_SEPARATE_BELOW * per_epoch)
        num_first_samples = without_last if last_epoch_apart else num_samples
    return OrderPlan(
        documents=documents,
        tokens_per_epoch=tokens_per_epoch,
        num_epochs=num_epochs,
        num_samples=num_samples,
        last_epoch_apart=last_epoch_apart,
        num_first_samples=num_first_samples,
    )


def _ceil_in_float32(tokens: int, step: int) -> int:
    """tokens / step rounded up, in single precision as in helpers.cpp: beyond 2**24 tokens it can be one off."""
    return int(np.ceil(np.float32(tokens) / np.float32(step)))
