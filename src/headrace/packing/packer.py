"""Token rows to the fields of a batch: one call into the packing pass (native/pack.c).

Shape legend: B micro_batch_size, S seq_length. Rows are [B, S + 1], or [B, S] with add_extra_token=False.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace import _native
from headrace.errors import ConfigError, FormatError
from headrace.packing.boundaries import document_ends
from headrace.packing.layouts import OUTPUT_DTYPES, batch_spec, find_layout
from headrace.packing.masks import write_mask
from headrace.packing.rules import MAX_TOKEN_ID, PackRules
from headrace.packing.supervised import write_targets

DocumentLengths = Sequence[Sequence[int]]

# Dtypes a Megatron store may have (the .idx dtype codes 1-5 and 8); the first two are packed as they lie.
_PACKED_AS_THEY_ARE = frozenset((np.dtype(np.uint16), np.dtype(np.int32)))
_WIDENED_FIRST = frozenset(np.dtype(kind) for kind in (np.uint8, np.int8, np.int16, np.int64))


class PackCounts(NamedTuple):
    """What is known about a packed batch without reading it again: Python ints, never a device synchronisation."""

    num_documents: int
    """Segments of attention; `cu_seqlens` holds one entry more."""
    max_seqlen: int
    """Longest segment in tokens, padding at the end of a row included: what a kernel finds laid out."""
    num_loss_tokens: int
    """Targets: the sum of the loss mask."""
    num_valid_tokens: int
    """Tokens that are text: what `document_lengths` account for, else those before the trailing pads of a row; none of
    a padding row. Where the pad is an id of the vocabulary, a row that really ends in it counts short."""


class Packer:
    """Rules and layout, bound once: each call then costs one pass over the rows and about 2 us.

    Holds no state from call to call, owns no memory, and may be used from several threads at once.
    """

    def __init__(self, rules: PackRules, *, layout: str = "megatron") -> None:
        self.rules = rules
        self.layout = layout
        found = find_layout(layout)
        # "" is no field's name: what the layout lacks is looked up like the rest and found absent.
        self._names = tuple(found.name_of(output) or "" for output in OUTPUT_DTYPES)
        self._known_names = {name for name, _ in found.outputs} | {alias for alias, _ in found.aliases}
        if layout == "megatron":
            self._known_names.add("attention_mask")
        self._ends_missing = rules.ends_at_eod and rules.eod is None
        flags = (
            (_native.RESET_POSITION_IDS if rules.reset_position_ids else 0)
            | (_native.RESET_ATTENTION_MASK if rules.reset_attention_mask else 0)
            | (_native.EOD_MASK_LOSS if rules.eod_mask_loss else 0)
        )
        # Without an eod no flag reads it (document_lengths aside), so any number will do.
        self._eod = -1 if rules.eod is None else rules.eod
        self._pad = rules.effective_pad
        self._last_id = -1 if rules.vocab_size is None else rules.vocab_size - 1
        self._flags = flags

    def pack_into(
        self,
        rows: npt.NDArray[Any],
        outputs: Mapping[str, npt.NDArray[Any]],
        *,
        document_lengths: DocumentLengths | None = None,
        targets: npt.NDArray[Any] | None = None,
        padding_rows: Sequence[int] = (),
    ) -> PackCounts:
        """Write the fields of `rows` into the caller's arrays, named as in the layout; any may be absent. An alias in
        `outputs` is taken for what it is, a second name of memory that is written under the first.

        `rows` is [B, S + 1] ([B, S] without the extra token), uint16 or int32; uint8, int8, int16 and int64 are
        converted first. Outputs are C-contiguous and writable: B * S elements each in the layout's dtype, boundaries as
        many as there are documents plus one (never more than B * S + 1). Boundaries count over the joined rows.

        `document_lengths`: per row, the lengths of the parts its text is made of (see `document_ends`). They win over
        `eod`: positions restart and attention ends with them, whatever the reset flags say; the tail they do not
        account for must be padding. `targets`: shaped like `rows`, what to learn of each token, -100 for nothing (see
        headrace.packing.supervised); needs document_lengths. `padding_rows`: rows delivered only to fill the batch,
        without a target. A dense attention mask among the outputs needs cu_seqlens there too.

        Does not block. Raises ConfigError when something does not fit and FormatError for an id outside the
        vocabulary; the outputs then hold nothing of use.
        """
        rows = _packable(rows, self.rules)
        num_rows, seq_length = rows.shape[0], rows.shape[1] - self.rules.add_extra_token
        if not outputs.keys() <= self._known_names:
            unknown = sorted(outputs.keys() - self._known_names)
            raise ConfigError(f"layout {self.layout!r} has the fields {sorted(self._known_names)}, got {unknown}")
        ends, accounted = None, None
        if document_lengths is not None:
            ends, accounted = document_ends(
                document_lengths,
                num_rows=num_rows,
                seq_length=seq_length,
                add_extra_token=self.rules.add_extra_token,
            )
            self._check_tails(rows, accounted)
        elif self._ends_missing:
            raise ConfigError("reset_position_ids and reset_attention_mask need `eod` or document_lengths, got neither")
        padding = _row_flags(padding_rows, num_rows) if len(padding_rows) else None
        arrays = tuple(map(outputs.get, self._names))
        try:
            *counts, first_foreign = _native.pack(
                rows, arrays, ends, padding, seq_length, self._eod, self._pad, self._last_id, self._flags
            )
        except ValueError as error:
            raise ConfigError(self._in_layout_names(str(error))) from None
        if first_foreign >= 0:
            raise _outside_vocabulary(rows, first_foreign, self.rules.vocab_size)
        if targets is not None:
            counts[2] = self._write_targets(targets, rows, document_lengths, outputs, padding_rows)
        if "attention_mask" in outputs:
            self._write_mask(outputs, counts[0])
        if accounted is not None:
            counts[3] = sum(min(n, seq_length) for row, n in enumerate(accounted) if not (padding and padding[row]))
        return PackCounts(*counts)

    def _write_targets(
        self,
        targets: npt.NDArray[Any],
        rows: npt.NDArray[Any],
        document_lengths: DocumentLengths | None,
        outputs: Mapping[str, npt.NDArray[Any]],
        padding_rows: Sequence[int],
    ) -> int:
        if document_lengths is None or targets.shape != rows.shape or targets.dtype.kind not in "iu":
            raise ConfigError(
                f"targets must be integers shaped like the rows {list(rows.shape)} and come with document_lengths, got "
                f"{targets.dtype} {list(targets.shape)} {'without' if document_lengths is None else 'with'} them"
            )
        return write_targets(
            targets,
            document_lengths,
            {output: outputs.get(name) for output, name in zip(OUTPUT_DTYPES, self._names, strict=True)},
            seq_length=rows.shape[1] - self.rules.add_extra_token,
            pad=self._pad,
            padding_rows=padding_rows,
        )

    def _write_mask(self, outputs: Mapping[str, npt.NDArray[Any]], num_documents: int) -> None:
        if "cu_seqlens" not in outputs:
            raise ConfigError(f"an attention_mask is made from cu_seqlens, the outputs are {sorted(outputs)}")
        write_mask(outputs["attention_mask"], outputs["cu_seqlens"][: num_documents + 1])

    def _in_layout_names(self, message: str) -> str:
        """The pass names its arguments; the caller knows fields."""
        output, space, rest = message.partition(" ")
        names = dict(zip(OUTPUT_DTYPES, self._names, strict=True))
        return f"{names.get(output) or output}{space}{rest}"

    def _check_tails(self, rows: npt.NDArray[Any], accounted: list[int]) -> None:
        for row, length in enumerate(accounted):
            tail = rows[row, length:]
            if tail.size and (tail != self._pad).any():
                at = int((tail != self._pad).argmax())
                raise ConfigError(
                    f"document_lengths of row {row} sum to {length} but the row has {rows.shape[1]} tokens, and token "
                    f"{tail[at]} at position {length + at} is no pad ({self._pad}); lengths count the extra token too"
                )


def pack(
    rows: npt.NDArray[Any],
    rules: PackRules,
    *,
    document_lengths: DocumentLengths | None = None,
    targets: npt.NDArray[Any] | None = None,
    padding_rows: Sequence[int] = (),
    layout: str = "megatron",
    flatten: bool = False,
    attention_mask: Literal["none", "dense"] = "none",
) -> dict[str, Any]:
    """The fields of `rows` in new arrays, which the caller owns, with `num_documents` and `max_seqlen` as ints.

    Dense fields are [B, S], boundaries exactly [num_documents + 1]. Arguments and errors as in `Packer.pack_into` and
    `batch_spec`.
    """
    packer = Packer(rules, layout=layout)
    rows = _packable(rows, rules)
    seq_length = rows.shape[1] - rules.add_extra_token
    spec = batch_spec(layout, rows.shape[0], seq_length, flatten=flatten, attention_mask=attention_mask)
    batch: dict[str, Any] = {field.name: np.empty(field.shape, field.dtype) for field in spec.fields}
    counts = packer.pack_into(
        rows, batch, document_lengths=document_lengths, targets=targets, padding_rows=padding_rows
    )
    for field in spec.fields:
        if field.ragged:  # a copy, so that the unused capacity does not live on behind a view
            batch[field.name] = batch[field.name][: counts.num_documents + 1].copy()
    batch |= {alias: batch[name] for alias, name in spec.aliases}
    return batch | {"num_documents": counts.num_documents, "max_seqlen": counts.max_seqlen}


def _packable(rows: npt.NDArray[Any], rules: PackRules) -> npt.NDArray[Any]:
    """The same rows, C-contiguous, in a dtype the pass reads. Copies only if it must."""
    if not isinstance(rows, np.ndarray):
        raise ConfigError(f"rows must be a NumPy array, got {type(rows).__name__}")
    if rows.ndim != 2 or rows.shape[0] < 1 or rows.shape[1] < rules.row_length(1):
        expected = "[micro_batch >= 1, seq_length + 1]" if rules.add_extra_token else "[micro_batch >= 1, seq_length]"
        raise ConfigError(f"rows must be {expected} with seq_length >= 1, got shape {list(rows.shape)}")
    if rows.dtype in _PACKED_AS_THEY_ARE:
        return np.ascontiguousarray(rows)
    if rows.dtype.newbyteorder("=") not in _PACKED_AS_THEY_ARE | _WIDENED_FIRST:
        raise ConfigError(f"rows must be uint16, int32, uint8, int8, int16 or int64, got {rows.dtype}")
    if rows.dtype.itemsize == 8 and not -MAX_TOKEN_ID <= rows.min() <= rows.max() <= MAX_TOKEN_ID:
        raise FormatError(f"token ids must fit int32, got ids from {rows.min()} to {rows.max()}")
    return np.ascontiguousarray(rows, np.int32)


def _row_flags(padding_rows: Sequence[int], num_rows: int) -> bytes:
    flags = bytearray(num_rows)
    for row in padding_rows:
        if not 0 <= row < num_rows:
            raise ConfigError(f"padding_rows must name rows of the batch, 0 to {num_rows - 1}, got {row}")
        flags[row] = 1
    return bytes(flags)


def _outside_vocabulary(rows: npt.NDArray[Any], index: int, vocab_size: int | None) -> FormatError:
    row, position = divmod(index, rows.shape[1])
    return FormatError(
        f"token id {rows[row, position]} (row {row}, position {position}) is outside the vocabulary [0, {vocab_size}): "
        "written by another tokenizer, or `vocab_size` too small"
    )
