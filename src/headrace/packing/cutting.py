"""Cutting a view out of batches: slices where the part is one, else one C pass per field (native/cut.h).

Shape legend: B rows, S tokens per row, T = B * S, L tokens of the rank's part. Token fields are those shaped [B, S]
like the tokens, the source's own among them; everything else that no stage knows passes through whole.

    what the slot holds (all ranks)             what rank 0 of cp_size 2 is handed
    tokens        [1, T]                        tokens             [1, L]   a copy in memory of its own
    cu_seqlens    [documents + 1]               cu_seqlens         the same memory
                                                cu_seqlens_padded  [documents + 1]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from headrace import _native
from headrace.errors import ConfigError
from headrace.packing.buffers import Buffers
from headrace.packing.context_parallel import pad_multiple, row_chunks, row_index
from headrace.packing.conventions import check_boundaries
from headrace.packing.layouts import IGNORED_LABEL
from headrace.packing.prediction import moved_boundaries, positions_after_moving
from headrace.packing.stages import TOKEN_KEYS
from headrace.packing.view import View

Array = TypeVar("Array")
Arrays = Mapping[str, npt.NDArray[Any]]

# The Megatron name of each field that a stage may need, under the names of all layouts.
ROLES = {
    "tokens": "tokens", "input_ids": "tokens", "input": "tokens",
    "labels": "labels", "shift_labels": "labels",
    "loss_mask": "loss_mask",
    "position_ids": "position_ids", "positions": "position_ids",
    "attention_mask": "attention_mask",
    "cu_seqlens": "cu_seqlens", "cu_seq_lens_q": "cu_seqlens", "cu_seq_lens_k": "cu_seqlens",
    "cu_seqlens_padded": "cu_seqlens_padded",
}  # fmt: skip

MAX_REMEMBERED = 512
"""Wrapped arrays kept for reuse; beyond it the memory is dropped and begins anew."""


INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)


class _Plan(NamedTuple):
    """Which runs make the part, and what they mean for the fields around it."""

    runs: npt.NDArray[np.int64]
    """[capacity, 3]: start, length, end of document."""
    num_runs: int
    shape: tuple[int, int]
    padded: Any = None
    """Boundaries of the documents with their padding, as they are handed out."""
    max_seqlen: int | None = None
    """Longest document as it is laid out now; None: as before."""


class _Field(NamedTuple):
    """A field that the view hands out, and what its name says about cutting it."""

    name: str
    role: str | None
    """Its Megatron name; None: no stage knows it."""
    fill: int
    """What a position without a token holds."""
    counts_on: bool
    """Padding continues it: positions."""
    blank_at_seam: bool
    """Labels moved right by one: the first of a run has its token elsewhere."""


class Cutter(Generic[Array]):
    """One view, applied to one batch after another. Used by one thread.

    Copies go to memory of its own, `num_buffers` batches in turn: the arrays of a batch hold until the num_buffers-th
    one after it. `wrap` makes what is handed out of a NumPy array, such as a tensor of the same memory.
    """

    def __init__(self, view: View, *, num_buffers: int = 1, wrap: Callable[[Any], Array] = lambda array: array) -> None:
        self.view = view
        self._keys = view.keys
        self._wrap = wrap
        self._buffers = Buffers(num_buffers, wrap)
        self._scratch: Buffers[npt.NDArray[Any]] = Buffers(1, lambda array: array)
        self._wrapped: dict[tuple[int, Any], tuple[Any, Array]] = {}
        self._row_plans: dict[tuple[int, ...], _Plan] = {}
        self._fields_by_names: dict[tuple[str, ...], tuple[_Field, ...]] = {}

    def cut(self, arrays: Arrays, max_seqlen: int) -> tuple[dict[str, Array], int]:
        """The view's part of a batch, and its longest document in tokens, padding included.

        `arrays` are C-contiguous and stay unchanged; slices of them are handed out where no copy is needed. Raises
        ConfigError if the batch cannot be cut this way: see headrace.packing.context_parallel and conventions.
        """
        view = self.view
        names = tuple(arrays)
        fields = self._fields_by_names.get(names)
        if fields is None:
            fields = self._fields_by_names[names] = self._fields_of(names)
        if view.cp_size == 1 and view.mtp_depth == 0:
            return {field.name: self._known(arrays[field.name]) for field in fields}, max_seqlen
        shape = _tokens_of(arrays).shape
        if view.cut == "contiguous" and view.mtp_depth == 0:
            return self._slices(arrays, fields, shape), max_seqlen
        self._buffers.next_turn()
        plan = self._plan(arrays, shape)
        taken: dict[str, Array] = {}
        parts = []
        for field in fields:
            name, _, fill, counts_on, blank_at_seam = field
            array = arrays[name]
            if view.cp_size == 1:
                taken[name] = self._known(array)
            elif array.shape == shape:
                dtype = array.dtype
                target, taken[name] = self._buffers.array(name, plan.shape, dtype)
                counts_on = counts_on and dtype.kind == "i" and dtype.itemsize >= 4
                parts.append((array, target, fill, counts_on, blank_at_seam))
            else:
                taken[name] = self._whole(field, array, shape)
        _native.cut(parts, plan.runs, plan.num_runs, 0)
        if plan.padded is not None:
            self._add_padded(taken, arrays, plan.padded)
        if view.mtp_depth:
            self._add_depths(taken, arrays, fields, plan)
        return taken, max_seqlen if plan.max_seqlen is None else plan.max_seqlen

    def forget(self) -> None:
        """Let go of the memory that batches were cut from: their ring has been replaced by a larger one."""
        self._wrapped.clear()

    # -- what is handed out --------------------------------------------------------------------------------------------

    def _fields_of(self, names: tuple[str, ...]) -> tuple[_Field, ...]:
        """Worked out once per set of names: every line of a batch's way costs microseconds after an idle gap."""
        if self.view.cp_size > 1:
            _require_target(names)
        fields = []
        for name in names:
            if is_needed(name, self._keys):
                is_moved = name == "labels" and "shift_labels" in names
                is_ignored = name == "shift_labels" or (name == "labels" and "loss_mask" not in names)
                role = ROLES.get(name)
                fields.append(
                    _Field(
                        name=name,
                        role=role,
                        fill=IGNORED_LABEL if is_moved or is_ignored else 0,
                        counts_on=role == "position_ids",
                        blank_at_seam=is_moved,
                    )
                )
        return tuple(fields)

    def _known(self, array: npt.NDArray[Any], part: Any = None) -> Array:
        """`array[part]` wrapped, the same object for the same array: wrapping costs 1-3 us, 20-80 us when cold."""
        key = (id(array), part)
        found = self._wrapped.get(key)
        if found is None:
            if len(self._wrapped) >= MAX_REMEMBERED:
                self._wrapped.clear()
            # Holding `array` keeps its id from being given to another one.
            wrapped = self._wrap(array if part is None else array[..., slice(*part)])
            found = self._wrapped[key] = (array, wrapped)
        return found[1]

    def _slices(self, arrays: Arrays, fields: tuple[_Field, ...], shape: tuple[int, ...]) -> dict[str, Array]:
        (chunk,) = row_chunks("contiguous", shape[1], self.view.cp_size, self.view.cp_rank)
        taken = {}
        for field in fields:
            array = arrays[field.name]
            taken[field.name] = self._known(array, chunk) if array.shape == shape else self._whole(field, array, shape)
        return taken

    def _whole(self, field: _Field, mask: npt.NDArray[Any], shape: tuple[int, ...]) -> Array:
        """What is not shaped like the tokens: as it lies, a mask [B, 1, S, S] -> [B, 1, L, S]: the rank's queries."""
        if field.role != "attention_mask":
            return self._known(mask)
        view = self.view
        if view.cut == "documents" or mask.ndim != 4 or mask.shape[2:] != (shape[1], shape[1]):
            raise ConfigError(
                f"an attention_mask of shape {list(mask.shape)} cannot be cut by {view.cut!r}; use cut='rows', or the "
                "boundaries in cu_seqlens instead of a mask"
            )
        queries = row_index(view.cut, shape[1], view.cp_size, view.cp_rank, ulysses_size=view.ulysses_size)
        return self._wrap(np.take(mask, queries, 2))

    def _add_padded(self, taken: dict[str, Array], arrays: Arrays, padded: Array) -> None:
        if "cu_seqlens" in arrays:
            taken["cu_seqlens_padded"] = padded
        else:  # these kernels know one list: that of what is laid out
            taken |= {name: padded for name in ("cu_seq_lens_q", "cu_seq_lens_k") if name in arrays}

    def _add_depths(self, taken: dict[str, Array], arrays: Arrays, fields: tuple[_Field, ...], plan: _Plan) -> None:
        depths = range(1, self.view.mtp_depth + 1)
        moves = self.view.mtp_boundaries == "moved"
        boundaries = _boundaries_of(arrays) if moves else np.empty(0, np.int32)
        for name, role, fill, _, is_moved in fields:
            if role not in TOKEN_KEYS or is_moved:
                continue
            array = arrays[name]
            shape = (len(depths), *plan.shape)
            target, taken[f"mtp_{name}"] = self._buffers.array(f"mtp_{name}", shape, array.dtype)
            for depth in depths:
                if moves and role == "position_ids":
                    target[depth - 1] = positions_after_moving(array, depth, cu_seqlens=boundaries)
                else:
                    _native.cut([(array, target[depth - 1], fill, 0, 0)], plan.runs, plan.num_runs, depth)
        if moves:
            for depth in depths:
                moved = moved_boundaries(boundaries, depth, seq_length=plan.shape[1])
                taken[f"mtp_cu_seqlens_{depth}"] = self._wrap(moved)

    # -- which tokens --------------------------------------------------------------------------------------------------

    def _plan(self, arrays: Arrays, shape: tuple[int, ...]) -> _Plan:
        view = self.view
        if view.cut == "documents" and view.cp_size > 1:
            return self._document_plan(arrays, shape[0] * shape[1])
        moves_in_documents = view.mtp_depth > 0 and view.mtp_boundaries == "kept" and _has_boundaries(arrays)
        if moves_in_documents:
            return _row_plan(view, shape, _boundaries_of(arrays))
        if shape not in self._row_plans:
            self._row_plans[shape] = _row_plan(view, shape, np.arange(shape[0] + 1, dtype=np.int32) * shape[1])
        return self._row_plans[shape]

    def _document_plan(self, arrays: Arrays, total: int) -> _Plan:
        view = self.view
        already_padded = arrays.get("cu_seqlens_padded")
        boundaries = _boundaries_of(arrays) if already_padded is None else already_padded
        # The cheap part of the check; the pass below sees every boundary anyway.
        if boundaries.dtype is not INT32 or boundaries.ndim != 1 or boundaries.item(0) or boundaries.item(-1) != total:
            check_boundaries(boundaries, total)
        runs, _ = self._scratch.array("runs", (2 * boundaries.size, 3), INT64)
        padded, handed_out = self._buffers.array("cu_seqlens_padded", boundaries.shape, INT32)
        multiple = pad_multiple(view.cp_size)
        num_runs, length, longest, first_wrong = _native.zigzag_runs(
            boundaries, padded, runs, multiple, view.cp_size, view.cp_rank
        )
        if first_wrong >= 0:
            check_boundaries(boundaries, total)
        if already_padded is not None:
            if length * view.cp_size != total:
                raise ConfigError(
                    f"cu_seqlens_padded says that documents are padded, but not all to multiples of {multiple} "
                    f"(2 * cp_size): {total} tokens would become {length * view.cp_size}"
                )
            handed_out = self._known(already_padded)
        return _Plan(runs=runs, num_runs=num_runs, shape=(1, length), padded=handed_out, max_seqlen=longest)


def is_needed(name: str, keys: Collection[str]) -> bool:
    """Whether a field, by its name in any layout, belongs to `keys` (Megatron's names). What no stage knows does."""
    return name not in ROLES or ROLES[name] in keys


def take_view(batch: Mapping[str, Any], view: View) -> dict[str, Any]:
    """One view of a batch, in new arrays or slices of the given ones. What is no array passes through; `max_seqlen`
    becomes that of the part. Errors as in `Cutter.cut`."""
    arrays = {name: np.ascontiguousarray(value) for name, value in batch.items() if isinstance(value, np.ndarray)}
    rest = {name: value for name, value in batch.items() if name not in arrays}
    cutter: Cutter[npt.NDArray[Any]] = Cutter(view)
    taken, max_seqlen = cutter.cut(arrays, batch.get("max_seqlen", 0))
    return taken | rest | ({"max_seqlen": max_seqlen} if "max_seqlen" in batch else {})


def _row_plan(view: View, shape: tuple[int, ...], boundaries: npt.NDArray[np.int32]) -> _Plan:
    """Chunks of each row, split where documents end: nothing moves from one into another."""
    num_rows, length = shape
    chunks = row_chunks(view.cut, length, view.cp_size, view.cp_rank, ulysses_size=view.ulysses_size)
    runs = []
    for row in range(num_rows):
        for chunk in chunks:
            start, last = (row * length + end for end in chunk)
            inside = np.searchsorted(boundaries, [start, last], side="right")
            ends = boundaries[inside[0] : inside[1]].tolist()
            if not ends or ends[-1] < last:
                ends.append(int(boundaries[inside[1]]))
            for end in ends:
                stop = min(end, last)
                runs.append((start, stop - start, end))
                start = stop
    table = np.array(runs, np.int64)
    return _Plan(runs=table, num_runs=len(table), shape=(num_rows, sum(end - start for start, end in chunks)))


def _tokens_of(arrays: Arrays) -> npt.NDArray[Any]:
    for name in ("tokens", "input_ids", "input"):
        if name in arrays and arrays[name].ndim == 2:
            return arrays[name]
    raise ConfigError(f"a view of a batch needs tokens [rows, seq_length] to cut, the batch has {sorted(arrays)}")


def _has_boundaries(arrays: Arrays) -> bool:
    return "cu_seqlens" in arrays or "cu_seq_lens_q" in arrays


def _boundaries_of(arrays: Arrays) -> npt.NDArray[np.int32]:
    if not _has_boundaries(arrays):
        raise ConfigError(
            f"cut='documents' needs to know where documents end: the batch has no cu_seqlens, only {sorted(arrays)}; "
            "give the source one, or take cut='rows'"
        )
    return arrays["cu_seqlens"] if "cu_seqlens" in arrays else arrays["cu_seq_lens_q"]


def _require_target(names: Collection[str]) -> None:
    """A model that shifts its labels by itself finds the wrong target, or none, where its row was cut."""
    if "input_ids" in names and "labels" in names and "shift_labels" not in names:
        raise ConfigError(
            "labels of a batch with input_ids are for a model that shifts them by itself, which a cut row does not "
            "allow: let the source give shift_labels (shift_labels[i] is the target of position i)"
        )
