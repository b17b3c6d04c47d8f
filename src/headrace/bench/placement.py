"""Where should each field be made: on the CPU, or on the device from the tokens? Body of `headrace bench placement`.

Per field: `cpu_us`, what the packing pass takes for it alone, in the feeder, beside the training; `copy_us`, moving it
to the device; `device_us`, making it there from tokens that are there already, from the call until the result is
complete. Where the host must read the result (attention kernels take the longest document as a host integer) that read
is included, and it is what stalls a training loop: everything enqueued before it has to finish first. Here nothing is
enqueued before it, so the device column is a lower bound.

Isolates: one field of one row, inputs in place on either side, equal results checked before anything is timed. Held
fixed: one thread on the CPU, the same rows on both sides. Without a device the columns of the device are None.
How it can mislead: a field alone costs the CPU a pass over the tokens, which fields made together share; the sum of the
rows is more than a batch costs (`all fields` is one pass). On the device launches dominate short rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.bench.pack import NUM_ROWS, Text, synthetic_text
from headrace.bench.pack_contenders import CP_SIZE, full_rules, one_torch_thread
from headrace.errors import ConfigError
from headrace.measure.environment import capture_environment
from headrace.measure.statistics import median, p99
from headrace.packing import Cutter, Packer, View, batch_spec, dense_mask

RECORD_VERSION = 1
ISOLATES = "one field of one row, inputs in place on either side"

SEQ_LENGTHS = (4096, 32768, 131072)
MASK_SEQ_LENGTHS = range(8193)
"""A dense mask is made for rows up to this: 64 MiB."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A field and the two ways of making it. `on_device(torch, text, boundaries)` returns a tensor."""

    name: str
    on_cpu: Callable[[int], Array]
    """Row number -> the field."""
    on_device: Callable[[Any, Any, Any], Any] | None
    nbytes: int | None = None
    """Of what is made, where it is more than the array that is returned."""
    host_reads: bool = False
    """The host needs the values: the device must be waited for."""


def run(
    *,
    seq_lengths: Sequence[int] = SEQ_LENGTHS,
    device: str | None = None,
    num_rounds: int = 50,
    num_warmup_rounds: int = 5,
    seed: int = 1234,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, Any]:
    """Times every field on both sides; the record is JSON-able.

    `device` as torch names it ("cuda", "npu", and "cpu" to try the device side out); None: the accelerator of this
    machine if there is one. `skipped` says why a column is empty. `clock` returns nanoseconds. ConfigError for sizes
    that measure nothing or a device that is not there.
    """
    if num_rounds < 1 or num_warmup_rounds < 0 or not seq_lengths or min(seq_lengths) < 1:
        raise ConfigError(
            f"num_rounds and seq_lengths must be at least 1 and num_warmup_rounds at least 0, got {num_rounds}, "
            f"{list(seq_lengths)} and {num_warmup_rounds}"
        )
    torch, chosen, skipped = find_device(device)
    rows: list[dict[str, Any]] = []
    for seq_length in seq_lengths:
        text = synthetic_text(seq_length, seed)
        with one_torch_thread():
            rows += [
                _time_field(placed, text, torch, chosen, num_warmup_rounds + num_rounds, num_warmup_rounds, clock)
                for placed in fields_of(text)
            ]
    return {
        "version": RECORD_VERSION,
        "isolates": ISOLATES,
        "environment": asdict(capture_environment()),
        "device": chosen,
        "rows": rows,
        "skipped": skipped,
        "summary": summarise(rows),
    }


def find_device(wanted: str | None) -> tuple[Any, str | None, dict[str, str]]:
    """torch, the device to use, and why there is none."""
    try:
        torch = import_module("torch")
    except ImportError as error:
        return None, None, {"device": f"{error}; pip install 'headrace[torch]'"}
    if wanted is None:
        if not torch.accelerator.is_available():
            return torch, None, {"device": "torch sees no accelerator on this machine"}
        wanted = str(torch.accelerator.current_accelerator())
    try:
        torch.zeros(1, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {wanted!r} cannot be used: {error}") from error
    return torch, wanted, {}


def fields_of(text: Text) -> list[Placed]:
    """Every field of Megatron's layout, a rank's part, a prediction depth, and a dense mask where it is small."""
    packer, seq_length = Packer(full_rules(text.eod)), text.seq_length
    outputs = {field.name: np.empty(field.shape, field.dtype) for field in batch_spec("megatron", 1, seq_length).fields}
    batches: list[dict[str, Array]] = []
    for row in text.rows:
        counts = packer.pack_into(row, outputs)
        whole = {name: array.copy() for name, array in outputs.items()}
        batches.append(whole | {"cu_seqlens": whole["cu_seqlens"][: counts.num_documents + 1]})

    def packed(name: str) -> Callable[[int], Array]:
        def make(row: int) -> Array:
            counts = packer.pack_into(text.rows[row], {name: outputs[name]})
            return outputs[name][: counts.num_documents + 1] if name == "cu_seqlens" else outputs[name]

        return make

    def all_fields(row: int) -> Array:
        packer.pack_into(text.rows[row], outputs)
        return outputs["tokens"]

    def cut_by(view: View, name: str) -> Callable[[int], Array]:
        cutter: Cutter[Array] = Cutter(view)
        alone = [{"tokens": one["tokens"], "cu_seqlens": one["cu_seqlens"]} for one in batches]
        return lambda row: cutter.cut(alone[row], 0)[0][name]

    eod = text.eod
    part = cut_by(View(cp_size=CP_SIZE), "tokens")
    placed = [
        Placed(name="labels", on_cpu=packed("labels"), on_device=_labels),
        Placed(name="loss_mask", on_cpu=packed("loss_mask"), on_device=partial(_loss_mask, eod=eod)),
        Placed(name="position_ids", on_cpu=packed("position_ids"), on_device=partial(_positions, eod=eod)),
        Placed(
            name="cu_seqlens", on_cpu=packed("cu_seqlens"), on_device=partial(_boundaries, eod=eod), host_reads=True
        ),
        Placed(name=f"tokens of 1 of {CP_SIZE} ranks", on_cpu=part, on_device=_part),
        Placed(name="tokens of depth 1", on_cpu=cut_by(View(mtp_depth=1), "mtp_tokens"), on_device=_moved),
        Placed(name="all fields", on_cpu=all_fields, on_device=None, nbytes=28 * seq_length),
    ]
    if seq_length in MASK_SEQ_LENGTHS:
        placed.append(
            Placed(
                name="attention_mask",
                on_cpu=lambda row: dense_mask(batches[row]["cu_seqlens"], 1, seq_length),
                on_device=_mask,
            )
        )
    return placed


def _time_field(
    placed: Placed,
    text: Text,
    torch: Any,
    device: str | None,
    num_rounds: int,
    num_warmup_rounds: int,
    clock: Callable[[], int],
) -> dict[str, Any]:
    sides: dict[str, Callable[[int], Any]] = {"cpu": placed.on_cpu}
    if device is not None:
        sides |= _device_sides(placed, text, torch, device)
    values: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(num_rounds):
        for side, make in sides.items():
            start = clock()
            make(number % NUM_ROWS)
            values[side].append((clock() - start) / 1e3)
    found: dict[str, Any] = {
        "field": placed.name,
        "seq_length": text.seq_length,
        "nbytes": placed.nbytes or int(placed.on_cpu(0).nbytes),
        "host_reads": placed.host_reads,
    }
    for side in ("cpu", "copy", "device"):
        measured = values.get(side, [])[num_warmup_rounds:]
        found |= {
            f"{side}_us": median(measured) if measured else None,
            f"{side}_p99_us": p99(measured) if measured else None,
            f"{side}_values_us": measured,
        }
    return found


def _device_sides(placed: Placed, text: Text, torch: Any, device: str) -> dict[str, Callable[[int], Any]]:
    def wait() -> None:
        if device != "cpu":
            torch.accelerator.synchronize()

    field = torch.from_numpy(placed.on_cpu(0).copy())

    def copy(row: int) -> None:
        field.to(device, copy=True)
        wait()

    make = placed.on_device
    if make is None:
        return {}
    texts = [torch.from_numpy(row[0].astype(np.int64)).to(device) for row in text.rows]
    boundaries = [_boundaries(torch, one, None, eod=text.eod) for one in texts]

    def on_device(row: int) -> Any:
        made = make(torch, texts[row], boundaries[row])
        if placed.host_reads:
            return made.tolist()
        wait()
        return made

    made = make(torch, texts[0], boundaries[0]).cpu().numpy()
    expected = placed.on_cpu(0)
    if not np.array_equal(made.reshape(expected.shape), expected):
        raise AssertionError(f"{placed.name}: the device and the CPU disagree")
    return {"copy": copy, "device": on_device}


def _labels(torch: Any, text: Any, boundaries: Any) -> Any:
    return text[1:].clone()[None]


def _loss_mask(torch: Any, text: Any, boundaries: Any, *, eod: int) -> Any:
    return (text[:-1] != eod).float()[None]


def _positions(torch: Any, text: Any, boundaries: Any, *, eod: int) -> Any:
    tokens = text[:-1]
    index = torch.arange(tokens.numel(), device=text.device)
    starts = torch.zeros_like(index)
    starts[1:] = torch.where(tokens[:-1] == eod, index[1:], 0)
    return (index - torch.cummax(starts, 0).values)[None]


def _boundaries(torch: Any, text: Any, boundaries: Any, *, eod: int) -> Any:
    tokens = text[:-1]
    ends = torch.nonzero(tokens[:-1] == eod).flatten() + 1
    edge = torch.tensor([0, tokens.numel()], device=text.device)
    return torch.cat([edge[:1], ends, edge[1:]]).int()


def _part(torch: Any, text: Any, boundaries: Any) -> Any:
    """Rank 0: the first and the last of 2 * CP_SIZE chunks of each padded document."""
    starts, lengths = boundaries[:-1].long(), torch.diff(boundaries).long()
    chunks = (lengths + 2 * CP_SIZE - 1) // (2 * CP_SIZE)
    document = torch.repeat_interleave(2 * chunks)
    begins = (torch.cumsum(2 * chunks, 0) - 2 * chunks)[document]
    within = torch.arange(document.numel(), device=text.device) - begins
    within += torch.where(within >= chunks[document], (2 * CP_SIZE - 2) * chunks[document], 0)
    held = within < lengths[document]
    return torch.where(held, text[torch.where(held, starts[document] + within, 0)], 0)[None]


def _moved(torch: Any, text: Any, boundaries: Any) -> Any:
    moved = torch.roll(text[:-1], -1)
    moved[boundaries[1:].long() - 1] = 0
    return moved[None, None]


def _mask(torch: Any, text: Any, boundaries: Any) -> Any:
    document = torch.repeat_interleave(torch.diff(boundaries).long())
    index = torch.arange(text.numel() - 1, device=text.device)
    return ((document[:, None] != document) | (index > index[:, None]))[None, None]


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """At the longest rows: for each field the CPU's time with the copy over the device's; None without a device."""
    longest = max(row["seq_length"] for row in rows)
    ratios = {
        row["field"]: None if row["device_us"] is None else (row["cpu_us"] + row["copy_us"]) / row["device_us"]
        for row in rows
        if row["seq_length"] == longest
    }
    return {"seq_length": longest, "cpu_over_device": ratios}
