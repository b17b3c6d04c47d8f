"""What a rank gets: a mapping of arrays, and what is known about them as Python ints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from headrace.errors import FeedClosed
from headrace.feed.production import Metadata

Array = TypeVar("Array")

# Names under which a layout's kernels expect the longest segment, as a Python int: flash attention refuses a tensor.
_MAX_SEQLEN_NAMES = {
    "cu_seqlens": ("max_seqlen",),
    "cu_seq_lens_q": ("max_length_q", "max_length_k"),
}


class Batch(Mapping[str, Array]):
    """One micro batch. `model(**batch)` works: keys are the layout's fields and its host integers.

    Arrays are views into the ring, valid while the batch is one of the feed's last `hold` batches; reading a key of an
    older one raises FeedClosed. With `owned=True` they are copies and always valid. Nothing here blocks or touches a
    device.
    """

    __slots__ = (
        "_arrays", "_blob", "_host_ints", "_is_valid", "_metadata",
        "consumed_samples", "index", "max_seqlen", "num_documents", "num_loss_tokens", "num_valid_tokens",
    )  # fmt: skip

    def __init__(
        self,
        arrays: Mapping[str, Array],
        index: int,
        counts: tuple[int, ...],
        is_valid: Callable[[int], bool],
        blob: Callable[[], bytes],
    ) -> None:
        self._arrays = arrays
        self.index = index
        self.consumed_samples, self.max_seqlen, self.num_documents, self.num_loss_tokens, self.num_valid_tokens = (
            counts[:5]
        )
        self._is_valid = is_valid
        self._blob = blob
        self._metadata: Metadata | None = None
        self._host_ints = {}
        for boundaries, names in _MAX_SEQLEN_NAMES.items():
            if boundaries in arrays and names[0] not in arrays:
                self._host_ints = dict.fromkeys(names, self.max_seqlen)

    def __getitem__(self, name: str) -> Any:
        if not self._is_valid(self.index):
            raise self._stale()
        try:
            return self._arrays[name]
        except KeyError:
            return self._host_ints[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._arrays
        yield from self._host_ints

    def __len__(self) -> int:
        return len(self._arrays) + len(self._host_ints)

    def __repr__(self) -> str:
        return f"Batch(index={self.index}, fields={list(self)}, num_documents={self.num_documents})"

    @property
    def actual_seq_len(self) -> tuple[int, ...]:
        """Ends of the documents over the joined rows, host ints without a leading 0: what Ascend's kernels take."""
        boundaries: Any = self["cu_seqlens" if "cu_seqlens" in self._arrays else "cu_seq_lens_q"]
        return tuple(boundaries[1:].tolist())

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
            if not self._is_valid(self.index):
                raise self._stale()
            self._metadata = msgspec.msgpack.decode(self._blob(), type=Metadata)
        return self._metadata

    def _stale(self) -> FeedClosed:
        return FeedClosed(
            f"batch {self.index} is no longer valid: it is not one of the last `hold` batches of its feed; "
            "raise hold, or take owned=True"
        )
