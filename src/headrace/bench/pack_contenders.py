"""Ways to fill a batch from one token row. Each contender is a function (row number, slot number) -> None.

headrace   the C pass, into the slot
memcpy     the finished batch copied into the slot: the same bytes written, nothing computed
numpy      vectorised NumPy into the slot, one slice of a ready-made arange per document
megatron   megatron-core's _get_ltor_masks_and_position_ids with both reset flags, into tensors it allocates:
           loss mask and positions only, so it does less than the others (no labels, no boundaries)
cp_view    what a rank of 2 context-parallel ones adds to that: its half of a finished batch, cut by documents
cp_memcpy  as many bytes copied from the same place in one piece per field
"""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.packing import Cutter, Packer, PackRules, View, batch_spec
from headrace.spec import FIELD_ALIGNMENT, align

Contender: TypeAlias = Callable[[int, int], None]
Fields: TypeAlias = dict[str, npt.NDArray[Any]]

PAD = -1
CP_SIZE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """Destinations in turn, as a ring has them: page-aligned, touched beforehand, fields on 128 bytes.

    `fields[k]` and `flat[k]` (uint8) are views of slot k; `memory` owns the bytes.
    """

    memory: mmap.mmap
    fields: tuple[Fields, ...]
    flat: tuple[npt.NDArray[np.uint8], ...]


def make_slots(seq_length: int, num_slots: int) -> Slots:
    """Slots for one row of `seq_length` tokens in Megatron's layout."""
    spec = batch_spec("megatron", 1, seq_length)
    memory = mmap.mmap(-1, num_slots * spec.nbytes)
    arena = np.frombuffer(memory, np.uint8)
    arena.fill(1)  # the first write to a page costs 30 times a copy; it must not be timed
    flat = tuple(arena[k * spec.nbytes : (k + 1) * spec.nbytes] for k in range(num_slots))
    all_fields = []
    for slot in flat:
        fields, start = {}, 0
        for field in spec.fields:
            fields[field.name] = slot[start : start + field.nbytes].view(field.dtype).reshape(field.shape)
            start += align(field.nbytes, FIELD_ALIGNMENT)
        all_fields.append(fields)
    return Slots(memory=memory, fields=tuple(all_fields), flat=flat)


def headrace_contender(rows: Sequence[npt.NDArray[Any]], eod: int, slots: Slots) -> Contender:
    """`rows` are [1, S + 1]; every flag of the rules is on."""
    packer = Packer(full_rules(eod))

    def fill(row: int, slot: int) -> None:
        packer.pack_into(rows[row], slots.fields[slot])

    return fill


def memcpy_contender(nbytes: int, slots: Slots) -> Contender:
    """Copies `nbytes`, what a packed row occupies, from one finished batch that stays as warm as the caches allow."""
    finished = np.ones(nbytes, np.uint8)
    targets = [slot[:nbytes] for slot in slots.flat]

    def copy(row: int, slot: int) -> None:
        np.copyto(targets[slot], finished)

    return copy


def numpy_contender(rows: Sequence[npt.NDArray[Any]], eod: int, slots: Slots) -> Contender:
    """The fastest NumPy form known for documents of hundreds of tokens and more."""
    ascending = np.arange(rows[0].shape[1], dtype=np.int64)

    def fill(row: int, slot: int) -> None:
        text, fields = rows[row][0], slots.fields[slot]
        tokens, labels = fields["tokens"][0], fields["labels"][0]
        np.copyto(tokens, text[:-1])
        np.copyto(labels, text[1:])
        is_end, is_pad = text[:-1] == eod, text == PAD
        np.copyto(fields["loss_mask"][0], ~(is_end | is_pad[1:]))
        if is_pad.any():
            tokens[is_pad[:-1]] = 0
            labels[is_pad[1:]] = 0
        ends = np.flatnonzero(is_end) + 1
        if not ends.size or ends[-1] != tokens.size:
            ends = np.append(ends, tokens.size)
        positions, start = fields["position_ids"][0], 0
        for end in ends.tolist():
            positions[start:end] = ascending[: end - start]
            start = end
        fields["cu_seqlens"][0] = 0
        fields["cu_seqlens"][1 : ends.size + 1] = ends

    return fill


def megatron_contender(rows: Sequence[npt.NDArray[Any]], eod: int) -> Contender:
    """Raises ImportError where megatron-core (extra: bench) or torch is not installed."""
    torch = importlib.import_module("torch")
    build = importlib.import_module("megatron.core.datasets.gpt_dataset")._get_ltor_masks_and_position_ids
    # Widened beforehand: the conversion is not part of the loop.
    texts = [torch.from_numpy(row[0, :-1].astype(np.int64)) for row in rows]

    def loop(row: int, slot: int) -> None:
        build(texts[row], eod, True, True, True, False)

    return loop


def cp_contenders(rows: Sequence[npt.NDArray[Any]], eod: int, slots: Slots) -> dict[str, Contender]:
    """Both read from `slots`, which they fill once with finished batches and nobody else may write."""
    packer, batches = Packer(full_rules(eod)), []
    for slot, fields in enumerate(slots.fields):
        counts = packer.pack_into(rows[slot % len(rows)], fields)
        batches.append(fields | {"cu_seqlens": fields["cu_seqlens"][: counts.num_documents + 1]})
    cutter: Cutter[Any] = Cutter(View(cp_size=CP_SIZE))
    dense = [{name: field for name, field in batch.items() if name != "cu_seqlens"} for batch in batches]
    part = slice(0, rows[0].shape[1] // CP_SIZE)
    targets = {name: np.empty_like(field[:, part]) for name, field in dense[0].items()}

    def cut(row: int, slot: int) -> None:
        cutter.cut(batches[slot], 0)

    def copy(row: int, slot: int) -> None:
        for name, target in targets.items():
            np.copyto(target, dense[slot][name][:, part])

    return {"cp_view": cut, "cp_memcpy": copy}


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Every contender has one thread, as in a DataLoader worker. Without torch there is nothing to hold back."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def full_rules(eod: int) -> PackRules:
    """Every flag that costs time."""
    return PackRules(eod=eod, pad=None, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
