"""What the fields of a batch are called, and what labels mean, in each framework.

| layout       | labels                                                    | a masked target                       |
|--------------|-----------------------------------------------------------|---------------------------------------|
| megatron     | `labels[i]` is the target of position i                   | any label; `loss_mask[i]` is 0        |
| transformers | `shift_labels[i]` is the target of position i; `labels`   | -100                                  |
|              | is moved right by one, for a model that shifts by itself  |                                       |
| torchtitan   | `labels[i]` is the target of position i                   | -100                                  |

A model that shifts by itself and takes Megatron's labels would train on the token after next, and a model without a
loss mask on padding: a layout is more than names. -100 is `torch.nn.functional.cross_entropy`'s default `ignore_index`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from headrace.errors import ConfigError
from headrace.packing.masks import mask_shape
from headrace.spec import BatchSpec, Field

IGNORED_LABEL = -100

# Everything the packing pass can write, in the order of its arguments. See native/pack.h for what each one holds.
OUTPUT_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "tokens": "int64",
        "labels": "int64",
        "loss_mask": "float32",
        "position_ids": "int64",
        "cu_seqlens": "int32",
        "hf_labels": "int64",
        "shift_labels": "int64",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Field names of one framework and the output of the packing pass each one holds, in slot order."""

    outputs: tuple[tuple[str, str], ...]
    aliases: tuple[tuple[str, str], ...] = ()
    """(second name, field): the same memory under two names."""

    def name_of(self, output: str) -> str | None:
        """The field that holds `output`, None where this layout has none."""
        return next((name for name, held in self.outputs if held == output), None)


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "megatron": Layout(
            outputs=(
                ("tokens", "tokens"),
                ("labels", "labels"),
                ("loss_mask", "loss_mask"),
                ("position_ids", "position_ids"),
                ("cu_seqlens", "cu_seqlens"),
            )
        ),
        "transformers": Layout(
            outputs=(
                ("input_ids", "tokens"),
                ("labels", "hf_labels"),
                ("shift_labels", "shift_labels"),
                ("position_ids", "position_ids"),
                ("cu_seq_lens_q", "cu_seqlens"),
            ),
            aliases=(("cu_seq_lens_k", "cu_seq_lens_q"),),
        ),
        "torchtitan": Layout(
            outputs=(
                ("input", "tokens"),
                ("positions", "position_ids"),
                ("labels", "shift_labels"),
                ("cu_seqlens", "cu_seqlens"),
            )
        ),
    }
)


def find_layout(name: str) -> Layout:
    """The layout of that name; ConfigError lists the known ones."""
    if name not in LAYOUTS:
        raise ConfigError(f"layout must be one of {', '.join(LAYOUTS)}, got {name!r}")
    return LAYOUTS[name]


def batch_spec(
    layout: str,
    micro_batch_size: int,
    seq_length: int,
    *,
    flatten: bool = False,
    attention_mask: Literal["none", "dense"] = "none",
) -> BatchSpec:
    """The fields of a packed batch: [B, S] each, boundaries [B * S + 1] (B micro_batch_size, S seq_length).

    Boundaries are ragged: a batch of n documents fills n + 1 of them. The capacity covers the worst text there is,
    where every token ends a document. `flatten`: the same memory as [1, B * S], what kernels for packed sequences take.
    `attention_mask="dense"`: a bool mask [B, 1, S, S] as well, Megatron's layout only; see headrace.packing.masks.
    """
    if micro_batch_size < 1 or seq_length < 1:
        raise ConfigError(
            f"micro_batch_size and seq_length must be at least 1, got {micro_batch_size} and {seq_length}"
        )
    found = find_layout(layout)
    dense = (1, micro_batch_size * seq_length) if flatten else (micro_batch_size, seq_length)
    boundaries = (micro_batch_size * seq_length + 1,)
    fields = tuple(
        Field(
            name=name,
            dtype=OUTPUT_DTYPES[output],
            shape=boundaries if output == "cu_seqlens" else dense,
            ragged=output == "cu_seqlens",
        )
        for name, output in found.outputs
    )
    if attention_mask not in ("none", "dense") or (attention_mask == "dense" and layout != "megatron"):
        raise ConfigError(
            f"attention_mask must be 'none', or 'dense' in layout 'megatron' (True: masked), got {attention_mask!r} in "
            f"layout {layout!r}"
        )
    if attention_mask == "dense":
        fields += (Field(name="attention_mask", dtype="bool", shape=mask_shape(*dense)),)
    return BatchSpec(fields=fields, aliases=found.aliases)
