"""Whole documents in rows: none is split unless it is longer than a row.

Best fit decreasing: the longest document first, each into the fullest row that still has room for it, else into a new
one (Ding et al., "Fewer Truncations Improve Language Modeling", ICML 2024, arXiv:2404.10830). On 3000 documents with
the lengths of web text this gives no row more than their tokens need at 2048 a row. What is left of a row is padding.
Documents of one length are dealt out in an order that the seed decides, and so are the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.errors import ConfigError
from headrace.order.plan import IntArray, OrderRules
from headrace.order.sample import Part
from headrace.order.split import split_range


class BestFitOrder:
    """`num_epochs` times every document, whole, in rows; or `rules.num_samples` rows. See SampleOrder.

    Row i is the same however many there are: `rules.num_samples` takes the first rows of epochs end to end, and may end
    inside one, whose other documents are then not there.

    `lengths`: tokens per sequence of the store, int32 [num_sequences]. `pad_documents_to`: each document takes a
    multiple of so many tokens, the rest is padding of its own (2 * cp_size: rows can then be cut by documents and keep
    their length). The number of rows depends on the lengths alone, so every epoch has as many. An epoch is packed when
    it is first asked for, about 2 s per million documents, and kept while it is one of the last two. A document longer
    than a row is cut into full rows, and a rest that is packed like a document. Raises ConfigError if there are no
    tokens or the rules ask for what this order has not.
    """

    def __init__(
        self,
        lengths: IntArray,
        rules: OrderRules,
        *,
        num_epochs: int = 1,
        pad_documents_to: int = 1,
        corpus: int = 0,
    ) -> None:
        if num_epochs < 1:
            raise ConfigError(f"`num_epochs` must be at least 1, got {num_epochs}")
        if num_epochs > 1 and rules.num_samples is not None:
            raise ConfigError(f"give `num_epochs` or `num_samples`, not both: got {num_epochs} and {rules.num_samples}")
        if pad_documents_to < 1 or rules.sequence_length % pad_documents_to:
            raise ConfigError(
                f"`pad_documents_to` must divide the sequence length {rules.sequence_length}, got {pad_documents_to}"
            )
        self.rules = rules
        self.corpus = corpus
        self.pad_documents_to = pad_documents_to
        documents = split_range(len(lengths), rules.split, rules.split_name)
        self._pieces = pieces_of(lengths, documents, step=rules.sequence_length, extra=rules.extra)
        if not len(self._pieces):
            raise ConfigError(f"this part of the corpus holds no tokens to pack (documents: {len(documents)})")
        # With padded documents the row itself must be a multiple: the extra token is then padding as well.
        self._capacity = rules.sequence_length + (rules.extra if pad_documents_to == 1 else 0)
        self._epochs: dict[int, tuple[IntArray, IntArray]] = {}
        self.samples_per_epoch = len(self._rows_of(0)[1]) - 1
        whole_epochs = num_epochs * self.samples_per_epoch
        self._num_samples = whole_epochs if rules.num_samples is None else rules.num_samples

    @property
    def row_tokens(self) -> int:
        """Tokens of a full sample."""
        return self.rules.sequence_length + self.rules.extra

    def __len__(self) -> int:
        """Number of samples of all epochs."""
        return self._num_samples

    def parts(self, sample: int) -> Sequence[Part]:
        """The documents of one row, see SampleOrder. Their lengths may add up to less than `row_tokens`."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        epoch, inside = divmod(sample, self.samples_per_epoch)
        pieces, starts = self._rows_of(epoch)
        return [
            Part(document, offset, length, self.corpus)
            for document, offset, length in pieces[starts[inside] : starts[inside + 1]].tolist()
        ]

    def _rows_of(self, epoch: int) -> tuple[IntArray, IntArray]:
        """Pieces in reading order, and where each row starts among them."""
        if (rows := self._epochs.get(epoch)) is None:
            random = np.random.RandomState((self.rules.seed + epoch) % 2**32)
            rows = _shuffled_rows(self._pieces, self._capacity, self.pad_documents_to, random)
            latest = dict(list(self._epochs.items())[-1:])  # two, because a micro batch may reach over an epoch's end
            self._epochs = latest | {epoch: rows}
        return rows


def pieces_of(lengths: IntArray, documents: range, *, step: int, extra: int) -> IntArray:
    """int64 [pieces, 3]: document, offset, length. One piece a document, more if it is longer than step + extra tokens.

    Pieces of one document share `extra` tokens, so that every token but the first is a label exactly once.
    """
    sizes = lengths[documents.start : documents.stop].astype(np.int64)
    # A last token that the piece before has as its label is no piece of its own.
    counts = np.where(sizes > step + extra, -(-(sizes - extra) // step), np.minimum(sizes, 1))
    owners = np.repeat(np.arange(len(sizes)), counts)
    offsets = step * (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts))
    taken = np.minimum(sizes[owners] - offsets, step + extra)
    return np.stack([owners + documents.start, offsets, taken], 1)


def best_fit(sizes: Sequence[int], capacity: int) -> tuple[list[int], int]:
    """The row of each size, in the order given, which must fall; and the number of rows. No size is above capacity.

    Rows are kept by the room they have left; bit r of one large integer says whether there is one with room r, so the
    smallest room that suffices is the lowest bit from there on.
    """
    rows: list[int] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = num_rows = 0
    for size in sizes:
        suffices = rooms >> size
        if suffices:
            room = size + (suffices & -suffices).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, num_rows
            num_rows += 1
        rows.append(row)
        left = room - size
        if left:
            with_room[left].append(row)
            rooms |= 1 << left
    return rows, num_rows


def _shuffled_rows(
    pieces: IntArray, capacity: int, multiple: int, random: np.random.RandomState
) -> tuple[IntArray, IntArray]:
    shuffled = pieces[random.permutation(len(pieces))]
    # A piece of step + extra tokens has the extra one as a label only: it fits a row of `capacity` all the same.
    sizes = np.minimum(-(-shuffled[:, 2] // multiple) * multiple, capacity)
    falling = np.argsort(-sizes, kind="stable")
    rows, num_rows = best_fit(sizes[falling].tolist(), capacity)
    # Documents of a row in the order in which they were drawn, not by length.
    numbers = np.empty(len(pieces), np.int64)
    numbers[falling] = random.permutation(num_rows)[rows]
    order = np.argsort(numbers, kind="stable")
    starts = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(numbers, minlength=num_rows), out=starts[1:])
    return shuffled[order], starts
