"""What a rank gets: a mapping of arrays, and what is known about them as Python ints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from headrace.errors import FeedClosed
from headrace.feed.production import Metadata
from headrace.shm.layout import read_blob

Array = TypeVar("Array")

# Names under which a layout's kernels expect the longest segment, as a Python int: flash attention refuses a tensor.
_MAX_SEQLEN_NAMES = {
    "cu_seqlens": ("max_seqlen",),
    "cu_seq_lens_q": ("max_length_q", "max_length_k"),
}


class Lender(Protocol):
    """Who lends the memory of a batch: its feed."""

    oldest_valid: int
    """Number of the oldest batch that may still be read."""


class _Nobody:
    oldest_valid = 0


COPIED: Lender = _Nobody()
"""The lender of batches that are copies: they stay valid for ever."""


def ends_of(arrays: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Ends of the documents as host ints; None where the arrays have no boundaries. On a device this is a wait."""
    for name in ("cu_seqlens_padded", "cu_seqlens", "cu_seq_lens_q"):
        if name in arrays:
            return tuple(arrays[name][1:].tolist())
    return None


class Batch(Mapping[str, Array]):
    """One micro batch. `model(**batch)` works: keys are the layout's fields and its host integers.

    Arrays are views into the ring, valid while the batch is one of the feed's last `hold` batches; reading a key of an
    older one raises FeedClosed. With `owned=True` they are copies and always valid. Nothing here blocks or touches a
    device.
    """

    __slots__ = ("_arrays", "_counts", "_ends", "_lender", "_metadata", "_slot", "index")

    # A batch is made for every step, and after an idle gap each line costs microseconds: whatever can wait until
    # somebody asks for it waits.
    def __init__(
        self,
        arrays: Mapping[str, Array],
        index: int,
        counts: tuple[int, ...],
        lender: Lender,
        slot: np.ndarray | None,
        metadata: Metadata | None = None,
        ends: tuple[int, ...] | None = None,
    ) -> None:
        """`slot` holds the metadata, unless they are given already; so do `arrays` the ends of the documents."""
        self._arrays = arrays
        self.index = index
        self._counts = counts
        self._lender = lender
        self._slot = slot
        self._metadata = metadata
        self._ends = ends

    def __getitem__(self, name: str) -> Any:
        if self.index < self._lender.oldest_valid:
            raise self._stale()
        try:
            return self._arrays[name]
        except KeyError:
            return self._host_ints()[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._arrays
        yield from self._host_ints()

    def __len__(self) -> int:
        return len(self._arrays) + len(self._host_ints())

    def _host_ints(self) -> dict[str, int]:
        for boundaries, names in _MAX_SEQLEN_NAMES.items():
            # No documents: the boundaries have a form of their own, and what they say is not known here.
            if boundaries in self._arrays and names[0] not in self._arrays and self.num_documents:
                return dict.fromkeys(names, self.max_seqlen)
        return {}

    def __repr__(self) -> str:
        return f"Batch(index={self.index}, fields={list(self)}, num_documents={self.num_documents})"

    def with_fields(self, names: Collection[str]) -> Batch[Array]:
        """The same batch, of which only these arrays show."""
        arrays = {name: array for name, array in self._arrays.items() if name in names}
        return Batch(arrays, self.index, self._counts, self._lender, self._slot, self._metadata, self._ends)

    @property
    def consumed_samples(self) -> int:
        """Samples of the whole job that are consumed once this batch is."""
        return self._counts[0]

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest segment."""
        return self._counts[1]

    @property
    def num_documents(self) -> int:
        """Segments of attention."""
        return self._counts[2]

    @property
    def num_loss_tokens(self) -> int:
        """Targets: the sum of the loss mask."""
        return self._counts[3]

    @property
    def num_valid_tokens(self) -> int:
        """Tokens that are text, not padding."""
        return self._counts[4]

    @property
    def actual_seq_len(self) -> tuple[int, ...]:
        """Ends of the documents over the joined rows, host ints without a leading 0: what Ascend's kernels take.

        Under a view that pads documents, where they end with their padding, counted over all ranks.
        """
        if self._ends is None:
            self._ends = ends_of(self)
        if self._ends is None:
            raise KeyError("cu_seqlens")
        return self._ends

    @property
    def samples(self) -> tuple[int, ...]:
        """Numbers of the samples in the rows of this micro batch; empty if the source does not number them."""
        return self._decoded().samples

    @property
    def extra(self) -> dict[str, Any]:
        """The source's keys that are not arrays."""
        return self._decoded().extra

    def _decoded(self) -> Metadata:
        if self._metadata is None:
            if self.index < self._lender.oldest_valid:
                raise self._stale()
            assert self._slot is not None
            self._metadata = msgspec.msgpack.decode(read_blob(self._slot), type=Metadata)
        return self._metadata

    def _stale(self) -> FeedClosed:
        return FeedClosed(
            f"batch {self.index} is no longer valid: it is not one of the last `hold` batches of its feed; "
            "raise hold, or take owned=True"
        )
