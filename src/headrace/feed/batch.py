"""What a rank gets: a mapping of arrays, and what is known about them as Python ints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import msgspec

from headrace import _native
from headrace.errors import FeedClosed
from headrace.feed.production import Metadata
from headrace.shm.layout import read_blob

Array = TypeVar("Array")

# Names under which a layout's kernels expect the longest segment, as a Python int: flash attention refuses a tensor.
_MAX_SEQLEN_NAMES = {
    "cu_seqlens": ("max_seqlen",),
    "cu_seq_lens_q": ("max_length_q", "max_length_k"),
}


def ends_of(arrays: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Ends of the documents as host ints; None where the arrays have no boundaries. On a device this is a wait."""
    for name in ("cu_seqlens_padded", "cu_seqlens", "cu_seq_lens_q"):
        if name in arrays:
            return tuple(arrays[name][1:].tolist())
    return None


class Batch(_native.Batch, Mapping[str, Array]):
    """One micro batch. `model(**batch)` works: keys are the layout's fields and its host integers.

    Arrays are views into the ring, valid while the batch is one of the feed's last `hold` batches; reading a key of an
    older one raises FeedClosed. With `owned=True` they are copies and always valid. Nothing here blocks or touches a
    device. `index`, `consumed_samples`, `max_seqlen`, `num_documents`, `num_loss_tokens` and `num_valid_tokens` are
    ints; they, and looking at an array, are native/batch.c's.

    Batch(arrays, index, counts, lender, memory, metadata, ends): the slot's `memory` holds the metadata unless they are
    given, and so do `arrays` the ends of the documents; no `lender`: the arrays are the caller's for ever.
    """

    __slots__ = ()

    def __missing__(self, name: str) -> int:
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
        return Batch(arrays, self.index, self._counts, self._lender, self._memory, self._metadata, self._ends)

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
            if not self._is_valid:
                self._raise_stale()
            assert self._memory is not None
            self._metadata = msgspec.msgpack.decode(read_blob(self._memory), type=Metadata)
        metadata: Metadata = self._metadata
        return metadata

    def _raise_stale(self) -> NoReturn:
        raise FeedClosed(
            f"batch {self.index} is no longer valid: it is not one of the last `hold` batches of its feed; "
            "raise hold, or take owned=True"
        )
