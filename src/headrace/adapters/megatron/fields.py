"""A micro batch on its way: a loader's dict -> the ring's fields -> the dict that Megatron's get_batch works with.

Shape legend: B micro_batch_size, S seq_length (packed rows of Megatron's SFT data are [1, S] or of any length).

    the loader's dict                 the ring                              what comes out, on every rank
    tokens, labels      [B, S]        the same                              the same, on the device
    loss_mask           [B, S]        the same                              the same, on the device
    position_ids        [B, S]        only with --reset-position-ids        else made on the device
    attention_mask      [B, 1, S, S]  the same, if the loader makes one     the same, on the device
    cu_seqlens          [1, n]        `given_cu_seqlens`, if there is one   the same, on the device
    max_seqlen          [1]           a host int                            a host tensor: `.item()` waits for nothing
                                      `cu_seqlens`, int32 [documents + 1]   Boundaries: exact, host ints ready
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.errors import ConfigError
from headrace.feed import Batch
from headrace.packing import read_boundaries

ROW_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
# As the loader gives them beside what is exact; under other names in the ring.
_GIVEN = {"cu_seqlens": "given_cu_seqlens", "cu_seqlens_padded": "given_cu_seqlens_padded"}
_KEPT = ("attention_mask", "local_cp_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundaries:
    """Where the documents of a micro batch end, over its joined rows. Nothing here needs the device."""

    actual_seq_len: tuple[int, ...]
    """Ends, without a leading 0: what Ascend's kernels take."""
    max_seqlen: int
    """Tokens of the longest document."""
    cu_seqlens: torch.Tensor
    """int32 [documents + 1], from 0, where the micro batch is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What decides how a micro batch is read. The same on all ranks of a group."""

    micro_batch_size: int
    seq_length: int
    has_fixed_shape: bool
    """Rows are [micro_batch_size, seq_length]; not so for packed SFT data and --variable-seq-lengths."""
    shares_positions: bool
    """--reset-position-ids."""
    eod: int | None
    keys: frozenset[str]
    """Fields that this pipeline stage needs, by Megatron's names."""


def to_ring(item: Mapping[str, Any], rules: Rules, number: int) -> dict[str, Any]:
    """What of micro batch `number` goes into the ring. ConfigError for one that is not what the run says."""
    if not isinstance(item, Mapping):
        raise ConfigError(f"micro batch {number} is a {type(item).__name__}; Megatron's loaders yield dicts of tensors")
    arrays = {name: _on_host(value) for name, value in item.items() if isinstance(value, torch.Tensor | np.ndarray)}
    _check_rows(arrays, rules, number)
    boundaries = _boundaries_of(item, arrays, rules)
    fields: dict[str, Any] = {name: arrays[name] for name in ROW_KEYS if name in rules.keys and name in arrays}
    fields["cu_seqlens"] = boundaries
    if not rules.shares_positions and fields.pop("position_ids", None) is not None:
        _check_counting(arrays["position_ids"], number)
        fields["row_shape"] = list(arrays["tokens"].shape)
    fields |= {name: arrays[name] for name in _KEPT if name in arrays and name in rules.keys | {"local_cp_size"}}
    fields |= {_GIVEN[name]: arrays[name] for name in _GIVEN if name in arrays}
    if "max_seqlen" in arrays:
        fields["given_max_seqlen"] = [arrays["max_seqlen"].tolist()]
    return fields | {"actual_seq_len": boundaries[1:].tolist()}


class FromRing:
    """The other way, on every rank. Remembers the positions that are made on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._positions: dict[tuple[int, ...], torch.Tensor] = {}

    def take(self, batch: Batch[torch.Tensor]) -> dict[str, Any]:
        """Megatron's keys as far as the batch has them, and `boundaries`. Tensors are the batch's: views, valid as it
        is."""
        extra = batch.extra
        taken: dict[str, Any] = {name: batch[name] for name in (*ROW_KEYS, *_KEPT) if name in batch}
        taken |= {name: batch[given] for name, given in _GIVEN.items() if given in batch}
        if "row_shape" in extra:
            taken["position_ids"] = self.positions(tuple(extra["row_shape"]))
        if "given_max_seqlen" in extra:
            taken["max_seqlen"] = torch.tensor(extra["given_max_seqlen"][0], dtype=torch.int32)
        taken["boundaries"] = Boundaries(
            actual_seq_len=tuple(extra["actual_seq_len"]), max_seqlen=batch.max_seqlen, cu_seqlens=batch["cu_seqlens"]
        )
        return taken

    def take_host(self, item: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
        """The same from what a FeedIterator yields: host tensors and host ints."""
        taken: dict[str, Any] = {
            name: item[name].to(self._device, non_blocking=True)
            for name in ROW_KEYS
            if name in rules.keys and (name != "position_ids" or rules.shares_positions)
        }
        if "position_ids" in rules.keys and not rules.shares_positions:
            taken["position_ids"] = self.positions(tuple(item["tokens"].shape))
        taken["boundaries"] = Boundaries(
            actual_seq_len=item["actual_seq_len"],
            max_seqlen=item["max_document"],
            cu_seqlens=torch.tensor([0, *item["actual_seq_len"]], dtype=torch.int32, device=self._device),
        )
        return taken

    def positions(self, shape: tuple[int, ...]) -> torch.Tensor:
        """int64 [B, S], each row 0 to S - 1, made once per shape where it is used."""
        if shape not in self._positions:
            row = torch.arange(shape[1], dtype=torch.int64, device=self._device)
            self._positions[shape] = row.expand(shape).contiguous()
        return self._positions[shape]


def _on_host(value: Any) -> npt.NDArray[Any]:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def _check_rows(arrays: Mapping[str, npt.NDArray[Any]], rules: Rules, number: int) -> None:
    if missing := [name for name in ("tokens", "labels", "loss_mask") if name not in arrays]:
        raise ConfigError(f"micro batch {number} has no {', '.join(missing)}, only {sorted(arrays)}")
    if "position_ids" in rules.keys and rules.shares_positions and "position_ids" not in arrays:
        raise ConfigError(f"micro batch {number} has no position_ids, which --reset-position-ids shares")
    tokens = arrays["tokens"]
    wanted = (rules.micro_batch_size, rules.seq_length) if rules.has_fixed_shape else tokens.shape
    for name in ROW_KEYS:
        if (name in arrays and arrays[name].shape != wanted) or tokens.ndim != 2:
            raise ConfigError(
                f"micro batch {number} has {name} of shape {list(arrays[name].shape)}; this run's are {list(wanted)} "
                "(--micro-batch-size x --seq-length)"
            )


def _check_counting(positions: npt.NDArray[Any], number: int) -> None:
    if not np.array_equal(positions, np.broadcast_to(np.arange(positions.shape[1]), positions.shape)):
        raise ConfigError(
            f"the position_ids of micro batch {number} do not count from 0 to {positions.shape[1] - 1} in every row: "
            "add --reset-position-ids, which shares them, or let the loader count"
        )


def _boundaries_of(
    item: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], rules: Rules
) -> npt.NDArray[np.int32]:
    """int32 [documents + 1]: what the loader says, else where positions restart, else after end-of-document tokens.

    A document of one token is a document: nothing is inferred from lengths (MindSpeed-LLM's
    recompute_valid_actual_seq_len takes such documents for padding and joins them to the next).
    """
    tokens = arrays["tokens"]
    for name in ("cu_seqlens", "actual_seq_len"):
        if item.get(name) is not None:
            written = arrays.get(name, item[name])
            if isinstance(written, np.ndarray):
                written = written.astype(np.int32, copy=False).reshape(-1, written.shape[-1])
                return read_boundaries(written if len(written) > 1 else written[0], seq_length=_row(written, tokens))
            return read_boundaries(written, seq_length=tokens.size)
    is_start = np.zeros(tokens.size + 1, bool)
    if rules.shares_positions and "position_ids" in arrays:
        is_start[:-1] = arrays["position_ids"].ravel() == 0
    elif rules.eod is not None:
        is_start[1:] = tokens.ravel() == rules.eod
    is_start[:: tokens.shape[1]] = True
    return np.flatnonzero(is_start).astype(np.int32)


def _row(written: npt.NDArray[Any], tokens: npt.NDArray[Any]) -> int:
    """Tokens that one list of boundaries covers: a row's where there is one per row, else all."""
    return int(tokens.shape[1] if len(written) == tokens.shape[0] else tokens.size)
