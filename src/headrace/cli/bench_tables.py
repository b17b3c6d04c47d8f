"""What the bench verbs show on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.wording import counted

Record = dict[str, Any]


def print_get_batch(record: Record, console: Console) -> None:
    """Times, then costs: one line per contender, shape and pace. Then who was faster than headrace, and the figures."""
    summary = record["summary"]
    ratios = {
        (one["over_headrace"], one["tp"], one["micro_batch_size"], one["seq_length"], one["pace_ms"]): one
        for one in summary["ratios"]
    }
    times = Table(title="get_batch, slowest rank of the group, us; and how many times headrace's")
    costs = Table(title="what it costs beside time")
    for table, names in (
        (times, ("pace ms", "median", "p99", "ratio", "95 %")),
        (costs, ("pace ms", "writer cores", "rank cores", "host MB", "KB read/step")),
    ):
        for name in ("contender", "tp", "batch", *names):
            table.add_column(
                name, justify="left" if name == "contender" else "right", no_wrap=name in ("contender", "batch")
            )
    previous = None
    for row in record["rows"]:
        shape = (row["tp"], row["micro_batch_size"], row["seq_length"])
        if previous not in (None, shape):
            times.add_section()
            costs.add_section()
        previous = shape
        first = (
            row["contender"],
            str(row["tp"]),
            f"{row['micro_batch_size']} x {row['seq_length']}",
            plain(row["pace_ms"]),
        )
        ratio = ratios.get((row["contender"], *shape, row["pace_ms"]), {})
        times.add_row(
            *first,
            plain(row["group_median_us"]),
            plain(row["group_p99_us"]),
            plain(ratio.get("ratio")),
            f"{plain(ratio['low'])}-{plain(ratio['high'])}" if ratio.get("low") is not None else "",
        )
        costs.add_row(
            *first,
            plain(row["writer_cpu"]),
            plain(row["rank_cpu"]),
            plain(row["host_rss_mb"]),
            plain(row["bytes_read_per_step"] / 1e3),
        )
    console.print(times)
    console.print(costs)
    checked = counted(record["checked_batches"], "batch")
    console.print(f"{checked} compared byte for byte: all contenders delivered the same")
    for one in summary["others_win"]:
        console.print(
            f"faster than headrace: {one['over_headrace']}, tp {one['tp']}, {one['micro_batch_size']} x "
            f"{one['seq_length']}, {one['pace_ms']:g} ms: {plain(one['ratio'])} of its time",
            style="red",
        )
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
    """Contenders that took turns in rounds: the named columns, median and p99; of the summary what was measured."""
    table = Table()
    for name in (*columns, "median us", "p99 us"):
        table.add_column(name.replace("_", " "), justify="left" if name in ("text", "what", "contender") else "right")
    for row in record["rows"]:
        table.add_row(
            *(plain(row[name]) if isinstance(row[name], float | None) else str(row[name]) for name in columns),
            plain(row["median_us"]),
            plain(row["p99_us"]),
        )
    console.print(table)
    for name, value in record["summary"].items():
        if value is not None and not isinstance(value, list):
            console.print(f"{name}: {plain(value) if isinstance(value, float) else value}", highlight=False)
    print_skipped(record, console)


def print_traces(record: Record, console: Console) -> None:
    """Load and breakdown of one trace, who takes how long and how much memory."""
    table = Table(title=f"a trace of {record['file_bytes'] / 1e6:,.0f} MB, {record['num_events']:,} events")
    for name in ("contender", "median s", "p99 s", "CPU s", "peak MB"):
        table.add_column(name, justify="left" if name == "contender" else "right")
    for row in record["rows"]:
        seconds = (plain(row.get(key)) for key in ("median_s", "p99_s", "cpu_median_s"))
        table.add_row(row["contender"], *seconds, plain(row["peak_bytes"] / 1e6))
    console.print(table)
    summary = record["summary"]
    for key, what in (("hta_over_headrace", "time"), ("hta_over_headrace_cpu", "CPU time")):
        low, high = summary.get(f"{key}_95") or (None, None)
        if low is not None:
            console.print(f"{what}: {plain(summary[key])} times, 95 % interval {plain(low)} to {plain(high)}")
    print_figures(record, console)


def print_placement(record: Record, console: Console) -> None:
    """One line per field and length: the CPU, the copy, the device with its wait."""
    table = Table(title=f"where a field is made, median us; device: {record['device'] or 'none'}")
    for name in ("field", "tokens", "KB", "CPU", "copy", "device", "host reads it"):
        table.add_column(name, justify="left" if name == "field" else "right", no_wrap=True)
    for row in record["rows"]:
        table.add_row(
            row["field"],
            str(row["seq_length"]),
            plain(row["nbytes"] / 1e3),
            *(plain(row[f"{side}_us"]) for side in ("cpu", "copy", "device")),
            "yes" if row["host_reads"] else "",
        )
    console.print(table)
    print_skipped(record, console)


def print_balance(record: Record, console: Console) -> None:
    """One line per text, row length and dealing, in multiples of a perfectly balanced step; then the figure."""
    table = Table(title="step time by document lengths, in perfect steps")
    for name in ("text", "tokens", "dealing", "median", "worst", "bound", "in turns"):
        table.add_column(name, justify="left" if name in ("text", "dealing") else "right", no_wrap=True)
    for row in record["rows"]:
        values = ("median_spread", "worst_spread", "worst_bound", "median_in_turns")
        table.add_row(row["text"], str(row["seq_length"]), row["dealing"], *(f"{row[name]:.3f}" for name in values))
    console.print(table)
    summary = record["summary"]
    console.print(
        f"{summary['num_steps_prevented']} of {summary['num_steps']} balanced steps hold single samples too expensive "
        f"for the figure; over the bound they leave: {summary['worst_over_bound']:.4f} at most",
        highlight=False,
    )
    print_figures(record, console)


def print_figures(record: Record, console: Console) -> None:
    """What was to be reached, and whether it is. Who was not there."""
    table = Table(title="figures to reach")
    for name in ("figure", "target", "found", ""):
        table.add_column(name, justify="right" if name in ("target", "found") else "left")
    figures = record["figures"] if "figures" in record else record["summary"]["figures"]
    covered = [figure for figure in figures if figure["reached"] is not None]
    for figure in covered:
        sign = ">=" if figure["reached_by"] == "at least" else "<="
        table.add_row(
            figure["what"],
            f"{sign} {plain(figure['target'])}",
            plain(figure["value"]),
            "reached" if figure["reached"] else "[red]missed[/]",
        )
    if covered:
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
