"""The order of Megatron's GPTDataset: for a seed, a split and a number of samples, which tokens make sample i.

Three index arrays, as in megatron/core/datasets/gpt_dataset.py (0.16.1), equal to its own bit for bit:

    document_index   documents in reading order, one epoch after another, all epochs shuffled together
    sample_index     where in that order each sample starts
    shuffle_index    the order in which the samples are delivered

One numpy RandomState makes all shuffles, so their sequence is part of the definition: documents (all epochs, or all but
the last), documents of the last epoch, samples of the first part, samples of the last epoch. The last epoch is shuffled
apart if less than 80 % of it is needed: otherwise a run would see late documents early and never see others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from headrace.order.index_cache import IndexCache
from headrace.order.plan import IndexArrays, IntArray, OrderPlan, OrderRules, plan_order
from headrace.order.sample import Part
from headrace.order.sample_index import build_sample_index

# A document travels with its length through the shuffle: it saves looking lengths up afterwards, here and there in
# memory (half of the C++ helper's time), and RandomState.shuffle moves 8 bytes faster than 4.
_DOCUMENT = np.dtype([("number", np.int32), ("length", np.int32)])


class MegatronOrder:
    """GPTDataset's samples over one corpus. See SampleOrder for what it answers.

    `lengths`: tokens per sequence of the store, int32 [num_sequences]; kept, not copied. `cache`: look for the index
    arrays on disk first, leave them there afterwards. Building takes about 30 ms per million documents and epoch and,
    for a moment, 16 bytes per document and epoch. Raises ConfigError if there is not a single sample.
    """

    def __init__(
        self, lengths: IntArray, rules: OrderRules, *, corpus: int = 0, cache: IndexCache | None = None
    ) -> None:
        self.rules = rules
        self.corpus = corpus
        self.plan = plan_order(lengths, rules)
        self._lengths = lengths
        arrays = cache.load(lengths, rules, self.plan) if cache is not None else None
        self.from_cache = arrays is not None
        """The arrays were found on disk."""
        if arrays is None:
            arrays = build_index_arrays(lengths, rules, self.plan)
            if cache is not None:
                cache.save(lengths, rules, arrays)
        self.document_index, self.sample_index, self.shuffle_index = arrays

    @property
    def row_tokens(self) -> int:
        """Tokens of a full sample."""
        return self.rules.sequence_length + self.rules.extra

    def __len__(self) -> int:
        """Number of samples."""
        return self.plan.num_samples

    def parts(self, sample: int) -> Sequence[Part]:
        """The parts of one sample, see SampleOrder."""
        if not 0 <= sample < self.plan.num_samples:
            raise IndexError(f"sample {sample} of {self.plan.num_samples}")
        at = int(self.shuffle_index[sample])
        (first, begin), (last, end) = self.sample_index[at : at + 2].tolist()
        end += self.rules.extra
        if first == last:
            return [Part(int(self.document_index[first]), begin, end - begin, self.corpus)] if end > begin else []
        documents = self.document_index[first : last + 1]
        numbers = documents.tolist()
        lengths = self._lengths.take(documents).tolist()
        lengths[0] -= begin
        lengths[-1] = end
        parts = list(map(Part, numbers, repeat(0), lengths, repeat(self.corpus)))
        parts[0] = Part(numbers[0], begin, lengths[0], self.corpus)
        # Empty documents, and a first one that had already ended, are no parts.
        return [part for part in parts if part.length] if min(lengths) == 0 else parts


def build_index_arrays(lengths: IntArray, rules: OrderRules, plan: OrderPlan) -> IndexArrays:
    """The three arrays, with one RandomState in Megatron's sequence."""
    random = np.random.RandomState(rules.seed)
    if plan.last_epoch_apart:
        first = shuffled_documents(lengths, plan.documents, plan.num_epochs - 1, random)
        last = shuffled_documents(lengths, plan.documents, 1, random)
        documents = np.concatenate((first, last))
    else:
        documents = shuffled_documents(lengths, plan.documents, plan.num_epochs, random)
    sample_index = build_sample_index(
        documents["length"],
        sequence_length=rules.sequence_length,
        num_samples=plan.num_samples,
        extra=rules.extra,
    )
    document_index = documents["number"].copy()
    return IndexArrays(document_index, sample_index, _shuffled_samples(plan, random))


def shuffled_documents(lengths: IntArray, documents: range, num_epochs: int, random: np.random.RandomState) -> IntArray:
    """Documents and their lengths, `num_epochs` times over, shuffled together."""
    once = np.empty(len(documents), _DOCUMENT)
    once["number"] = np.arange(documents.start, documents.stop, dtype=np.int32)
    once["length"] = lengths[documents.start : documents.stop]
    tiled = np.tile(once, num_epochs)
    # As whole 8-byte numbers: RandomState draws the same positions for any dtype of the same length.
    random.shuffle(tiled.view(np.int64))
    return tiled


def _shuffled_samples(plan: OrderPlan, random: np.random.RandomState) -> IntArray:
    # Megatron widens at the last but one number that 32 bits hold.
    dtype = np.uint32 if plan.num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(plan.num_samples, dtype=dtype)
    random.shuffle(order[: plan.num_first_samples])
    if plan.last_epoch_apart:
        random.shuffle(order[plan.num_first_samples :])
    return order
