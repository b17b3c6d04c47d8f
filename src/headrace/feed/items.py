"""Batches that somebody else made: an iterable of dicts, written into slots as they come."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from headrace.errors import ConfigError
from headrace.feed.production import Metadata, Written
from headrace.spec import BatchSpec, Field

# Names of the boundaries of documents, [documents + 1], in the layouts that have them.
BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q")
_PLAIN = (type(None), str, bytes, int, float, bool, list, tuple, dict)
_NONE = np.empty(0, np.int64)
_NO_MORE = object()


class ItemProduction:
    """A Production over an iterable of dicts. Shapes may change from batch to batch; names and dtypes may not."""

    def __init__(self, items: Iterable[Mapping[str, Any]], *, num_shards: int) -> None:
        """A batch consumes the rows of its first array, and as many on each of the other shards."""
        self._items = items
        self._iterator: Iterator[Mapping[str, Any]] | None = None
        self._num_to_drop = 0
        self._num_shards = num_shards
        self._dtypes: dict[str, np.dtype[Any]] | None = None
        self._arrays: dict[str, np.ndarray] = {}
        self._spec: BatchSpec | None = None
        self._metadata = Metadata()
        self._num_batches = 0
        self._consumed_samples = 0

    def resume(self, *, source_state: Any, num_drawn: int, consumed_samples: int) -> None:
        """Continue after a checkpoint: by the source's own state, else by drawing and dropping `num_drawn` batches."""
        self._consumed_samples = consumed_samples
        if source_state is None:
            self._num_to_drop = num_drawn
        elif hasattr(self._items, "load_state_dict"):
            self._items.load_state_dict(source_state)

    def advance(self) -> BatchSpec | None:
        """See Production. ConfigError for what cannot be shared; the source's own exceptions pass through."""
        item: Any = next(self._begun(), _NO_MORE)
        if item is _NO_MORE:
            return None
        arrays, extra = self._sorted(item)
        self._check_dtypes(arrays)
        self._arrays = arrays
        state = pickle.dumps(self._items.state_dict()) if hasattr(self._items, "state_dict") else None
        self._metadata = Metadata(extra=extra, source_state=state)
        self._num_batches += 1
        self._consumed_samples += _num_rows(arrays) * self._num_shards
        shapes = tuple(Field(name=name, dtype=array.dtype.str, shape=array.shape) for name, array in arrays.items())
        if self._spec is None or self._spec.fields != shapes:
            self._spec = BatchSpec(fields=shapes)
        return self._spec

    def _begun(self) -> Iterator[Any]:
        """Not before the state is loaded: a loader that has begun would begin again, and a generator cannot."""
        if self._iterator is None:
            self._iterator = iter(self._items)
            for _ in range(self._num_to_drop):
                next(self._iterator, None)
        return self._iterator

    def write(self, arrays: Mapping[str, np.ndarray]) -> Written:
        for name, array in self._arrays.items():
            np.copyto(arrays[name], array)
        boundaries = next((self._arrays[name] for name in BOUNDARIES if name in self._arrays), _NONE)
        # What is not a row of integers has a form of its own. int64: differences of unsigned numbers would wrap.
        are_ends = boundaries.ndim == 1 and boundaries.dtype.kind in "iu"
        lengths = np.diff(boundaries.astype(np.int64)) if are_ends else _NONE
        return Written(
            consumed_samples=self._consumed_samples,
            max_seqlen=int(lengths.max(initial=0)),
            num_documents=len(lengths),
            metadata=self._metadata,
        )

    def close(self) -> None:
        """Generators close their files; a DataLoader's workers end with its iterator."""
        with contextlib.suppress(Exception):
            close = getattr(self._iterator, "close", None)
            if close is not None:
                close()

    def _sorted(self, item: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        if not isinstance(item, Mapping):
            raise ConfigError(
                f"batch {self._num_batches} of the source is a {type(item).__name__}; a source yields dicts of arrays"
            )
        arrays: dict[str, np.ndarray] = {}
        extra: dict[str, Any] = {}
        for name, value in item.items():
            if not isinstance(name, str):
                raise ConfigError(f"batch {self._num_batches} of the source has the key {name!r}; keys are strings")
            # np.float64 is a float as well, but its kind decides, not whether Python knows it.
            if isinstance(value, _PLAIN) and not isinstance(value, np.number):
                extra[name] = value
            else:
                arrays[name] = self._as_array(name, value)
        if not arrays:
            raise ConfigError(f"batch {self._num_batches} of the source holds no array, only {sorted(extra)}")
        try:
            # MessagePack, not JSON, which would turn NaN into null and bytes into base64 without a word.
            return arrays, msgspec.msgpack.decode(msgspec.msgpack.encode(extra)) if extra else {}
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"batch {self._num_batches} has keys that are neither arrays nor JSON: {error}"
            ) from error

    def _as_array(self, name: str, value: Any) -> np.ndarray:
        if isinstance(value, np.ma.MaskedArray):
            raise ConfigError(
                f"field {name!r} of batch {self._num_batches} is a masked array, and a slot holds no mask; give "
                "filled values, and the mask as a field of its own"
            )
        try:
            # A tensor that requires gradients, or lies on a device, says here how to get a plain CPU copy of it.
            array = np.ascontiguousarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"field {name!r} of batch {self._num_batches} is no CPU array: {error}") from error
        if np.ndim(value) == 0:
            array = array.reshape(())
        if array.dtype.hasobject:
            raise ConfigError(
                f"field {name!r} of batch {self._num_batches} has dtype {array.dtype}: objects cannot be shared"
            )
        if array.dtype.kind == "V":
            raise ConfigError(
                f"field {name!r} of batch {self._num_batches} has dtype {array.dtype}, which its type string "
                f"{array.dtype.str} does not say; split a structured field into plain ones, view bfloat16 as uint16"
            )
        return array

    def _check_dtypes(self, arrays: dict[str, np.ndarray]) -> None:
        dtypes = {name: array.dtype for name, array in arrays.items()}
        if self._dtypes is None:
            self._dtypes = dtypes
        if dtypes == self._dtypes:
            return
        for name in sorted(self._dtypes.keys() | dtypes.keys()):
            was, now = self._dtypes.get(name, "absent"), dtypes.get(name, "absent")
            if was != now:
                raise ConfigError(
                    f"field {name!r} was {was} in the first batch and is {now} in batch {self._num_batches}; names and "
                    "dtypes of a feed's fields are fixed by its first batch"
                )


def _num_rows(arrays: dict[str, np.ndarray]) -> int:
    first = next(iter(arrays.values()))
    return first.shape[0] if first.ndim else 1
