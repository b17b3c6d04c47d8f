"""What one rank takes of a packed micro batch, as `headrace inspect` shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.packing import View, take_view

if TYPE_CHECKING:
    from headrace.cli.inspect_sample import Sample

SHOWN_VALUES = 24


def describe_view(sample: Sample, **asked: Any) -> dict[str, Any] | None:
    """The view that the options name, as `view_of` describes it; None if it is all of the batch."""
    view = View(**asked)
    return view_of(sample, view) if view != View() else None


def view_of(sample: Sample, view: View) -> dict[str, Any]:
    """The view's fields: dtype, shape and values each; `max_seqlen` as an int. ConfigError if it cannot be cut so."""
    batch = {
        "tokens": np.array(sample.tokens, np.int64),
        "labels": np.array(sample.labels, np.int64),
        "loss_mask": np.array(sample.loss_mask, np.float32),
        "position_ids": np.array(sample.position_ids, np.int64),
        "cu_seqlens": np.array(sample.cu_seqlens, np.int32),
        "max_seqlen": sample.max_seqlen,
    }
    taken = take_view(batch, view)
    fields = {
        name: {"dtype": array.dtype.name, "shape": list(array.shape), "values": array.tolist()}
        for name, array in taken.items()
        if isinstance(array, np.ndarray)
    }
    return {"view": repr(view), "fields": fields, "max_seqlen": taken["max_seqlen"]}


def print_view(console: Console, described: dict[str, Any]) -> None:
    """One line per field."""
    table = Table(title=described["view"], title_justify="left")
    for name in ("field", "dtype", "shape", "values"):
        table.add_column(name, no_wrap=name == "field")
    for name, field in described["fields"].items():
        values = np.array(field["values"], field["dtype"]).ravel()
        shown = " ".join(f"{value:g}" for value in values[:SHOWN_VALUES]) + (
            " ..." if values.size > SHOWN_VALUES else ""
        )
        table.add_row(name, field["dtype"], str(field["shape"]), Text(shown))
    console.print(table)
    console.print(f"max_seqlen {described['max_seqlen']}")
