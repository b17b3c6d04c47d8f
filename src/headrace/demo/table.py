"""The document for people: one column per feed, then what it comes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.demo.results import CONTENDERS
from headrace.wording import counted

Pick = Callable[[dict[str, Any]], float | None]

# (name, value of a feed, format, whether less is better)
_ROWS: tuple[tuple[str, Pick, str, bool], ...] = (
    ("get_batch, median ms", lambda feed: feed["get_batch_ms"]["median"], "{:,.3f}", True),
    ("get_batch, p99 ms", lambda feed: feed["get_batch_ms"]["p99"], "{:,.3f}", True),
    ("CPU seconds", lambda feed: feed["cpu_s"], "{:,.3f}", True),
    ("host RAM, MB", lambda feed: feed["host_rss_mb"], "{:,.1f}", True),
    ("bytes through read()", lambda feed: feed["bytes_read"], "{:,.0f}", True),
    ("step, median ms", lambda feed: feed["step_ms"]["median"], "{:,.1f}", True),
    ("tokens/s", lambda feed: feed["tokens_per_s"], "{:,.0f}", False),
    ("tokens/day", lambda feed: _three_digits(feed["tokens_per_day"]), "{:,.0f}", False),
)
_PHASES = ("data", "forward", "backward", "optimizer", "other")
_TERMS = (
    "get_batch: from a barrier until the slowest rank has its batch; "
    "step: all of a training step, in blocks that use one feed only"
)


def print_table(document: dict[str, Any], console: Console) -> None:
    """The best of each row is bold, whoever it is."""
    table = Table(title=_title(document), caption=_caption(document), title_justify="left", caption_justify="left")
    table.add_column("")
    for name in CONTENDERS:
        table.add_column(name, justify="right")
    feeds = [document["feeds"][name] for name in CONTENDERS]
    for label, pick, pattern, less_is_better in _ROWS:
        values = [pick(feed) for feed in feeds]
        known = [value for value in values if value is not None]
        best = (min if less_is_better else max)(known) if len(set(known)) > 1 else None
        table.add_row(label, *(_cell(value, pattern, bold=value is not None and value == best) for value in values))
    table.add_section()
    for phase in _PHASES:
        table.add_row(f"{phase}, median ms", *(_cell(feed["phases_ms"][phase], "{:,.2f}") for feed in feeds))
    console.print(table)
    console.print(_TERMS, style="dim", highlight=False, soft_wrap=True)
    for line in conclusions(document):
        console.print(line, highlight=False, soft_wrap=True)


def conclusions(document: dict[str, Any]) -> list[str]:
    """What the figures come to, a sentence each."""
    gain = document["throughput_gain"]
    limits = "no interval"
    if gain["low"] is not None:
        limits = f"{gain['level']:.0%} interval {gain['low']:+.2%} to {gain['high']:+.2%}"
    possible = document["possible_gain"]
    losses = document["losses"]
    return [
        f"get_batch of the slowest rank: {document['get_batch_reduction']:.1%} less than with the broadcast",
        f"the broadcast's get_batch is {document['get_batch_share']:.2%} of its step; "
        f"throughput of a feed that costs nothing, at most: {'not known' if possible is None else f'{possible:+.2%}'}",
        f"throughput of headrace, measured over whole blocks: {gain['value']:+.2%} ({limits}): {gain['verdict']}"
        + (f" ({gain['reason']})" if gain["reason"] else ""),
        f"batches of all feeds on all ranks identical, byte for byte: {_yes(document['identical_batches'])}",
        f"losses of trainings from one seed identical, bit by bit: {_yes(document['identical_losses'])} "
        f"({losses[0]:.4f} -> {losses[-1]:.4f} in {counted(len(losses), 'step')})",
    ]


def _title(document: dict[str, Any]) -> str:
    return (
        f"{document['model']}, {document['parameters'] / 1e6:.1f} M parameters, TP={document['tp']}, "
        f"{document['micro_batch_size']} x {document['seq_length']} tokens per step, "
        f"{counted(document['steps'], 'step')}"
    )


def _caption(document: dict[str, Any]) -> str:
    environment = document["environment"]
    return (
        f"{counted(document['corpus']['documents'], 'document')}, {counted(document['corpus']['tokens'], 'token')}; "
        f"{environment['backend']} on {environment['device']}, {counted(len(environment['affinity']), 'core')}; "
        "times are the slowest rank's; RAM, bytes (messages between processes too) and CPU are the feed's own, "
        "all ranks together"
    )


def _cell(value: float | None, pattern: str, *, bold: bool = False) -> str:
    if value is None:
        return "not seen"
    text = pattern.format(value)
    return f"[bold]{text}[/bold]" if bold else text


def _three_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def _yes(truth: bool) -> str:
    return "yes" if truth else "NO"
