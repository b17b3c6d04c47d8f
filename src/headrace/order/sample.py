"""What a sample is made of, and what every order answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Part(NamedTuple):
    """A run of tokens of one document: plain ints, ready for `TokenStore.read_into`."""

    document: int
    """Number of the sequence in its store. GPTDataset takes every sequence for a document."""
    offset: int
    """First token, counted in the document."""
    length: int
    """Tokens, at least 1."""
    corpus: int = 0
    """Which store of a blend."""


class SampleOrder(Protocol):
    """A fixed order of samples: the same arguments give the same parts in every process and on every machine.

    Threads and processes may share one; nothing is consumed by asking.
    """

    @property
    def row_tokens(self) -> int:
        """Tokens of a full sample: the sequence length, plus one where the last token is only a label."""

    def __len__(self) -> int:
        """Number of samples."""

    def parts(self, sample: int) -> Sequence[Part]:
        """The parts of one sample in reading order, without empty ones. Costs a few microseconds.

        Their lengths add up to `row_tokens`; to less only for a last partial sample that was kept, which the caller
        fills with padding. Raises IndexError outside [0, len).
        """
