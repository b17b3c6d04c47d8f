"""Batches that somebody else made: an iterable of dicts, written into slots as they come."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from headrace.errors import ConfigError
from headrace.feed.production import Metadata, Written
from headrace.spec import BatchSpec, Field


class ItemProduction:
    """A Production over an iterable of dicts. Shapes may change from batch to batch; names and dtypes may not."""

    def __init__(self, items: Iterable[Mapping[str, Any]], *, num_shards: int) -> None:
        """A batch consumes the rows of its first array, and as many on each of the other shards."""
        self._items = items
        self._iterator: Iterator[Mapping[str, Any]] = iter(items)
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
            self._iterator = itertools.islice(self._iterator, num_drawn, None)
        elif hasattr(self._items, "load_state_dict"):
            self._items.load_state_dict(source_state)
            self._iterator = iter(self._items)

    def advance(self) -> BatchSpec | None:
        """See Production. ConfigError for what cannot be shared; the source's own exceptions pass through."""
        item = next(self._iterator, None)
        if item is None:
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

    def write(self, arrays: Mapping[str, np.ndarray]) -> Written:
        for name, array in self._arrays.items():
            np.copyto(arrays[name], array)
        cu_seqlens = self._arrays.get("cu_seqlens")
        lengths = np.diff(cu_seqlens) if cu_seqlens is not None and cu_seqlens.ndim == 1 else np.empty(0, np.int32)
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
            if value is None or isinstance(value, str | bytes | int | float | bool | list | tuple | dict):
                extra[name] = value
            else:
                arrays[name] = self._as_array(name, value)
        if not arrays:
            raise ConfigError(f"batch {self._num_batches} of the source holds no array, only {sorted(extra)}")
        try:
            extra = msgspec.json.decode(msgspec.json.encode(extra)) if extra else {}
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"batch {self._num_batches} has keys that are neither arrays nor JSON: {error}"
            ) from error
        return arrays, extra

    def _as_array(self, name: str, value: Any) -> np.ndarray:
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
        return array

    def _check_dtypes(self, arrays: dict[str, np.ndarray]) -> None:
        dtypes = {name: array.dtype for name, array in arrays.items()}
        if self._dtypes is None:
            self._dtypes = dtypes
        if dtypes == self._dtypes:
            return
        for name in self._dtypes.keys() | dtypes.keys():
            was, now = self._dtypes.get(name, "absent"), dtypes.get(name, "absent")
            if was != now:
                raise ConfigError(
                    f"field {name!r} was {was} in the first batch and is {now} in batch {self._num_batches}; names and "
                    "dtypes of a feed's fields are fixed by its first batch"
                )


def _num_rows(arrays: dict[str, np.ndarray]) -> int:
    first = next(iter(arrays.values()))
    return first.shape[0] if first.ndim else 1
