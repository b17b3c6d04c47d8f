"""What the bench verbs show on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Record = dict[str, Any]

_VERDICTS = {"better": "headrace is faster", "worse": "[red]this one is faster[/]", "cannot tell": "cannot tell"}


def print_get_batch(record: Record, console: Console) -> None:
    """One line per contender, shape and pace; beside others, how many times headrace's time they take."""
    ratios = {
        (one["over_headrace"], one["tp"], one["micro_batch_size"], one["seq_length"], one["pace_ms"]): one
        for one in record["summary"]["ratios"]
    }
    table = Table(title="get_batch, slowest rank of the group")
    for name in ("contender", "tp", "batch", "pace ms", "median us", "p99 us", "over headrace", "95 %", ""):
        table.add_column(name, justify="left" if name in ("contender", "") else "right")
    for name in ("writer cores", "rank cores", "host MB", "KB read/step"):
        table.add_column(name, justify="right")
    previous = None
    for row in record["rows"]:
        case = (row["tp"], row["micro_batch_size"], row["seq_length"], row["pace_ms"])
        if previous not in (None, case[:3]):
            table.add_section()
        previous = case[:3]
        ratio = ratios.get((row["contender"], *case))
        table.add_row(
            row["contender"],
            str(row["tp"]),
            f"{row['micro_batch_size']} x {row['seq_length']}",
            f"{row['pace_ms']:g}",
            plain(row["group_median_us"]),
            plain(row["group_p99_us"]),
            "" if ratio is None else f"{plain(ratio['ratio'])}x",
            "" if ratio is None or ratio["low"] is None else f"{plain(ratio['low'])}-{plain(ratio['high'])}",
            "" if ratio is None else _VERDICTS[ratio["verdict"]],
            f"{row['writer_cpu']:.2f}",
            f"{row['rank_cpu']:.2f}",
            f"{row['host_rss_mb']:.0f}",
            f"{row['bytes_read_per_step'] / 1e3:.0f}",
        )
    console.print(table)
    console.print(f"{record['checked_batches']} batches compared byte for byte: all contenders delivered the same")
    print_figures(record, console)


def print_handover(record: Record, console: Console) -> None:
    """Ready and blocked hand-overs."""
    table = Table(title="hand-over of a finished batch")
    for name in ("kind", "contender", "readers", "median us", "p99 us", "slowest reader us", "writer us"):
        table.add_column(name, justify="left" if name in ("kind", "contender") else "right")
    for row in record["rows"]:
        readers = row.get("beside_readers", row["num_readers"])
        table.add_row(
            f"{row['kind']} {row.get('state', '').replace('_', ' ')}",
            row["contender"] + (f" (1, beside {readers})" if readers != row["num_readers"] else ""),
            str(row["num_readers"]),
            plain(row["median_us"]),
            plain(row["p99_us"]),
            plain(row.get("slowest_median_us")),
            plain(row.get("writer_median_us")),
        )
    console.print(table)
    print_figures(record, console)


def print_rounds(record: Record, console: Console, *, columns: Sequence[str]) -> None:
    """Contenders that took turns in rounds: the named columns, then median and p99; then the summary."""
    table = Table()
    for name in (*columns, "median us", "p99 us"):
        table.add_column(name.replace("_", " "), justify="left" if name in ("text", "what", "contender") else "right")
    for row in record["rows"]:
        table.add_row(
            *(plain(row[name]) if isinstance(row[name], float) else str(row[name]) for name in columns),
            plain(row["median_us"]),
            plain(row["p99_us"]),
        )
    console.print(table)
    for name, value in record["summary"].items():
        if not isinstance(value, list):
            console.print(f"{name}: {plain(value) if isinstance(value, float) else value}", highlight=False)
    print_skipped(record, console)


def print_figures(record: Record, console: Console) -> None:
    """What was to be reached, and whether it is. Who was not there."""
    table = Table(title="figures to reach")
    for name in ("figure", "target", "found", ""):
        table.add_column(name, justify="right" if name in ("target", "found") else "left")
    for figure in record["summary"]["figures"]:
        if figure["reached"] is None:
            continue
        sign = ">=" if figure["reached_by"] == "at least" else "<="
        table.add_row(
            figure["what"],
            f"{sign} {plain(figure['target'])}",
            plain(figure["value"]),
            "reached" if figure["reached"] else "[red]missed[/]",
        )
    console.print(table)
    print_skipped(record, console)


def print_skipped(record: Record, console: Console) -> None:
    """Contenders that could not take part."""
    for name, reason in record["skipped"].items():
        console.print(f"without {name}: {reason}", markup=False, highlight=False)


def plain(value: float | None) -> str:
    """Three digits that matter, no exponent; empty for nothing."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.6f}"
