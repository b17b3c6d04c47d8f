"""An order that is computed, not built: it starts at once at any sample, however large the corpus is.

    stored stream   |----document 0----|--1--|--------2--------|---3---| ...
    samples         |    0    |    1    |    2    |    3    |    4    |      cut where it lies, S tokens each
    epoch e         sample numbers permuted by a key made of seed and e (permutation.py)

A sample is found by bisection over the starts of the documents, which the .idx file already holds as a running sum. So
nothing of the corpus's size is allocated or read: a sample touches some log2(documents) entries of the index.

The price beside Megatron's order: a sample's documents are neighbours in the store, epoch after epoch. Where the store
is sorted by origin, shuffle documents when it is prepared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from headrace.errors import ConfigError, FormatError
from headrace.order.permutation import KeyedPermutation
from headrace.order.plan import IntArray, OrderRules
from headrace.order.sample import Part
from headrace.order.split import split_range


class ElasticOrder:
    """Samples of one corpus in a computed order. See SampleOrder for what it answers.

    `lengths`: tokens per sequence, int32 [num_sequences]. `starts`: where each begins, int64 [num_sequences], in units
    of which `units_per_token` make a token: TokenStore.pointers with its dtype's itemsize, or a running sum with 1.
    Both are kept, not copied, may be mapped, and are read entry by entry.

    Sample i is the same whatever `num_epochs` or `rules.num_samples` say; they only say where to end, the second one
    wins. Raises ConfigError if there is not a single sample; FormatError, when such a sample is asked for, if two
    sequences do not lie end to end.
    """

    def __init__(
        self,
        lengths: IntArray,
        starts: IntArray,
        rules: OrderRules,
        *,
        num_epochs: int = 1,
        units_per_token: int = 1,
        corpus: int = 0,
    ) -> None:
        if num_epochs < 1:
            raise ConfigError(f"`num_epochs` must be at least 1, got {num_epochs}")
        if not rules.drop_last_partial:
            raise ConfigError("the elastic order drops a last partial sample, `drop_last_partial` must be True")
        self.rules = rules
        self.corpus = corpus
        self._lengths, self._starts, self._unit = lengths, starts, units_per_token
        self._documents = split_range(len(lengths), rules.split, rules.split_name)
        self._first = int(starts[self._documents.start])
        last = self._documents.stop - 1
        tokens = (int(starts[last]) - self._first) // units_per_token + int(lengths[last])
        self.samples_per_epoch = (tokens - rules.extra) // rules.sequence_length
        if self.samples_per_epoch < 1:
            raise ConfigError(
                f"one sample needs {rules.sequence_length + rules.extra} tokens, this part of the corpus holds "
                f"{tokens} (documents: {len(self._documents)}); lower `sequence_length` or take a larger corpus"
            )
        whole_epochs = num_epochs * self.samples_per_epoch
        self._num_samples = whole_epochs if rules.num_samples is None else rules.num_samples
        self._shuffles: dict[int, KeyedPermutation] = {}

    @property
    def row_tokens(self) -> int:
        """Tokens of a full sample."""
        return self.rules.sequence_length + self.rules.extra

    def __len__(self) -> int:
        """Number of samples of all epochs."""
        return self._num_samples

    def parts(self, sample: int) -> Sequence[Part]:
        """The parts of one sample, see SampleOrder. About 10 us, most of it the permutation and the bisection."""
        if not 0 <= sample < self._num_samples:
            raise IndexError(f"sample {sample} of {self._num_samples}")
        epoch, inside = divmod(sample, self.samples_per_epoch)
        begin = self._shuffle_of(epoch)(inside) * self.rules.sequence_length
        return self._cut(begin, begin + self.row_tokens)

    def _shuffle_of(self, epoch: int) -> KeyedPermutation:
        if (shuffle := self._shuffles.get(epoch)) is None:
            shuffle = KeyedPermutation(self.samples_per_epoch, f"seed {self.rules.seed}, epoch {epoch}")
            # Two, because a micro batch may reach over the end of an epoch.
            self._shuffles = dict(list(self._shuffles.items())[-1:]) | {epoch: shuffle}
        return shuffle

    def _cut(self, begin: int, end: int) -> list[Part]:
        """Tokens [begin, end) of this part of the stream, document by document, without empty ones."""
        first = self._holder(begin, self._documents.start)
        behind_last = self._holder(end - 1, first) + 1
        lengths = self._lengths[first:behind_last].tolist()
        start = self._token_at(first)
        parts = []
        for document, length in enumerate(lengths, first):
            if self._token_at(document) != start:
                raise FormatError(
                    f"sequence {document} starts at token {self._token_at(document)} of its part of the corpus, the "
                    f"one before it ends at {start}: the elastic order needs sequences end to end; build the store "
                    'again, or use order="megatron"'
                )
            if length:
                offset = max(0, begin - start)
                parts.append(Part(document, offset, min(length, end - start) - offset, self.corpus))
            start += length
        if start < end:
            raise FormatError(f"sequence {behind_last - 1} ends at token {start} of its part, tokens to {end} needed")
        return parts

    def _holder(self, token: int, lowest: int) -> int:
        """The document that holds a token: the last one that starts at or before it, and so no empty one.

        Python's bisection, because np.searchsorted copies all of an unaligned array, as a mapped index is, first.
        """
        at = self._first + token * self._unit
        return bisect_right(self._starts, at, lo=lowest, hi=self._documents.stop) - 1

    def _token_at(self, document: int) -> int:
        return (int(self._starts[document]) - self._first) // self._unit
