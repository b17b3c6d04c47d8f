"""`headrace compare A B`: two recorded runs side by side, each figure with its interval and a verdict it can bear."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from headrace.cli.document import check_writable, write_document
from headrace.errors import ConfigError
from headrace.measure.compare import MetricComparison, RunComparison, compare_runs
from headrace.measure.job import join_ranks
from headrace.measure.linearity import Linearity
from headrace.measure.memory import in_gib
from headrace.measure.record import read_run

RECORD_VERSION = 1
COLOURS = {"better": "green", "worse": "red", "cannot tell": "yellow"}


def compare(
    run_a: Annotated[Path, typer.Argument(metavar="A", help="Records of the run to compare with: a folder or a file.")],
    run_b: Annotated[Path, typer.Argument(metavar="B", help="Records of the run to judge.")],
    smallest_effect: Annotated[
        float, typer.Option(help="Differences below this fraction are neither better nor worse.")
    ] = 0.01,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Is run B better than run A, worse, or can it not be told? With linearity when they differ in size."""
    check_writable(json)
    if not 0.0 <= smallest_effect < 1.0:
        raise ConfigError(f"--smallest-effect is a fraction such as 0.01, got {smallest_effect}")
    found = compare_runs(join_ranks(read_run(run_a)), join_ranks(read_run(run_b)), smallest_effect=smallest_effect)
    print_comparison(Console(), found)
    write_document(json, {"version": RECORD_VERSION, "kind": "compare"} | asdict(found))


def print_comparison(console: Console, found: RunComparison) -> None:
    """The table, what ran differently, and the verdict in one line."""
    table = Table(
        title=f"A {found.run_a}   B {found.run_b}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for column in ("", "A", "B", "B / A", "95 % interval", "B is"):
        # What was found stays whole however narrow the terminal is: names and values wrap first.
        table.add_column(
            column,
            justify="left" if column in ("", "B is") else "right",
            no_wrap=column not in ("", "A", "B"),
            overflow="fold",
        )
    for metric in found.metrics:
        table.add_row(*row(metric))
    console.print(table)
    for metric in found.metrics:
        if metric.reason is not None and (metric.a is not None or metric.b is not None):
            console.print(f"{metric.name}: {metric.reason}", style="dim", markup=False, highlight=False)
    for difference in found.differences:
        console.print(f"different: {difference}", markup=False)
    if found.linearity is not None:
        console.print(linearity_text(found.linearity), markup=False)
    if found.strong_scaling is not None and found.strong_scaling.speedup is not None:
        strong = found.strong_scaling
        console.print(f"strong scaling: speedup {strong.speedup:.2f}, efficiency {strong.efficiency:.1%}", markup=False)
    for note in found.notes:
        console.print(f"note: {note}", markup=False)
    other_work = "" if found.same_work else "not the same work, see what is different above; "
    console.print(
        f"verdict: {found.verdict} (by {found.decided_by}; {other_work}differences under {found.smallest_effect:.1%} "
        "do not count; one run each: what differs between two starts is not in the intervals)",
        style=COLOURS[found.verdict],
        markup=False,
    )


def row(metric: MetricComparison) -> tuple[str, ...]:
    """One line of the table."""
    values = (in_unit(metric.a, metric.unit), in_unit(metric.b, metric.unit))
    ratio = interval = ""
    if metric.ratio is not None and metric.ratio.estimate is not None:
        ratio = f"{metric.ratio.estimate:.3f}"
        if metric.ratio.low is not None and metric.ratio.high is not None:
            interval = f"{metric.ratio.low:.3f}..{metric.ratio.high:.3f}"
    colour = COLOURS[metric.verdict]
    said = "" if metric.ratio is None else f"[{colour}]{metric.verdict}[/{colour}]"
    return (metric.name, *values, ratio, interval, said)


def in_unit(value: float | None, unit: str) -> str:
    """A number for people: times in ms or s, memory in GiB, rates (whose name says per what) with separators."""
    if value is None:
        return "-"
    if unit == "bytes":
        return in_gib(value)
    if unit == "s":
        return f"{value * 1e3:.3f} ms" if value < 1.0 else f"{value:,.3f} s"
    return f"{value:,.0f}" if value >= 1000.0 else f"{value:.1f}"


def linearity_text(found: Linearity) -> str:
    """Linearity in one sentence, with what keeps it from meaning what it seems to."""
    if found.value is None:
        return f"linearity: not known, {found.reason}"
    text = f"linearity {found.kind}: {found.value:.3f} of {found.units:g} times the throughput ({found.finding})"
    if found.superlinear:
        text += "; above 1: caches, smaller optimizer shards, or noise"
    if found.differences:
        text += "; not the same in both runs: " + "; ".join(found.differences)
    return text
