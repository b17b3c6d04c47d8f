"""The report for a terminal: the verdict first (headline, numbers, what would disprove it), then step time, waits,
bandwidth and utilisation, in this order of importance (a slow link matters less than a slow rank, unused matrix units
less than either)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from headrace.report.summary import (
    FREE_PARTS,
    WATERFALL_PARTS,
    Json,
    check_document,
    extent,
    flat_breakdown,
    link_headline,
    mean_per_rank,
    milliseconds,
    notes_of,
    quantity,
    rank_headline,
    reasons,
    share,
    wait_steps,
)

GOOD, BAD, OPEN = "green", "red", "yellow"
COLOUR_OF_VERDICT = {"none": GOOD, "undecidable": OPEN}
MAX_ROWS = 32
"""Ranks or links per table; a large job is read in the HTML report or in CSV."""


def print_report(console: Console, document: Json) -> None:
    """Print the whole report. Raises FormatError for a document of another version."""
    check_document(document)
    _print_verdicts(console, document)
    _print_log(console, document["training_log"])
    _print_step_time(console, document)
    _print_waits(console, document)
    _print_bandwidth(console, document)
    _print_utilisation(console, document)
    _print_named_rules(console, document)
    _print_notes(console, document)


def _print_verdicts(console: Console, document: Json) -> None:
    if document["training_log"] is not None:
        return
    _print_verdict(console, document["slow_rank"], rank_headline(document))
    link = document["slow_link"]
    if link["verdict"] == "undecidable":  # most jobs' traces tell of no link: no second headline
        console.print(Text(f"{link['what']}; to decide it: {link['disproved_by']}", style="dim"))
    else:
        _print_verdict(console, link, link_headline(document))


def _print_verdict(console: Console, verdict: Json, headline: str) -> None:
    """The headline alone on its line; below it the numbers, and what would disprove them."""
    colour = COLOUR_OF_VERDICT.get(verdict["verdict"], BAD)
    line = Text(headline, style=f"bold {colour}")
    if verdict.get("sure"):
        line.append(f" (confidence: {verdict['sure']})", style="not bold")
    console.print(line)
    remedy = "to decide it" if verdict["verdict"] == "undecidable" else "would be disproved by"
    for below in (Text(reasons(verdict, headline)), Text(f"{remedy}: {verdict['disproved_by']}", style="dim")):
        console.print(Padding(below, (0, 0, 0, 2), expand=False))


def _print_log(console: Console, log: Json | None) -> None:
    if log is None:
        return
    table = _table("training log", ("figure", "value"))
    table.add_row("median step time", f"{log['step_time_median_s'] * 1000:,.1f} ms")
    table.add_row("steps", f"{log['num_steps']}, {log['warm_up_steps']} warm-up left out")
    for key, name in (
        ("tokens_per_s", "tokens per second"),
        ("tflops_per_device", "TFLOP/s per device"),
        ("published_tflops_per_device", "the same, as logged"),
    ):
        if log.get(key) is not None:
            table.add_row(name, f"{log[key]:,.1f}")
    if log["peak_memory_mb"]:
        table.add_row("peak memory", f"{max(log['peak_memory_mb']):,.0f} MB on the fullest device")
    console.print(table)


def _print_step_time(console: Console, document: Json) -> None:
    columns = {
        "e2e_us": "step",
        "computing_us": "computing",
        "communication_us": "communication",
        "overlapped_us": "hidden",
        "communication_not_overlapped_us": "exposed",
        "free_us": "free",
        "bubble_us": "bubble",
        "preparing_us": "preparing",
    }
    means = mean_per_rank(flat_breakdown(document), (*columns, *FREE_PARTS))
    if not means:
        return
    always = list(columns)[:6]
    _print_times(console, f"step time in ms, mean of {extent(document['steps'])}", means, columns, always)
    _print_times(console, "free time in ms by cause", means, FREE_PARTS, ())


def _print_times(
    console: Console, title: str, means: dict[object, Json], columns: Mapping[str, str], always: Sequence[str]
) -> None:
    """A row per rank; columns that are empty or zero on all ranks are left out, unless they are `always` there."""
    shown = {key: name for key, name in columns.items() if key in always or any(row[key] for row in means.values())}
    if not shown:
        return
    table = _table(title, ("rank", *shown.values()))
    for rank, row in list(means.items())[:MAX_ROWS]:
        table.add_row(_rank(rank), *(milliseconds(row[key]) for key in shown))
    console.print(table)
    _say_more(console, len(means))


def _print_waits(console: Console, document: Json) -> None:
    if not document["waits"]:
        return
    table = _table(f"waits in ms over {extent(wait_steps(document))}", ("rank", "waited", "most of it for"))
    for row in document["waits"][:MAX_ROWS]:
        longest = sorted(row["waited_for"].items(), key=lambda item: -item[1])[:3]
        whom = ", ".join(f"{peer} ({us / 1000:,.1f})" for peer, us in longest if us > 0)
        table.add_row(_rank(row["rank"]), milliseconds(row["wait_us"]), whom)
    console.print(table)
    _say_more(console, len(document["waits"]))


def _print_bandwidth(console: Console, document: Json) -> None:
    kinds = document["collectives"]["kinds"]
    if kinds:
        heading = ("group", "operation", "count", "total ms", "waited ms", "busbw GB/s")
        table = _table("collectives by what they cost", heading)
        for row in kinds[:10]:
            busbw = row["median_busbw_gb_s"]
            group = row["group"] or (f"{len(row['ranks'])} ranks" if row["ranks"] else "")
            cells = (
                milliseconds(row["total_us"]),
                milliseconds(row["waited_us"]),
                "-" if busbw is None else f"{busbw:.2f}",
            )
            table.add_row(group[:28], row["kind"], str(row["count"]), *cells)
        console.print(table)
    links = sorted(document["slow_link"]["links"], key=_link_ratio)
    if links:
        table = _table("links, slowest first", ("from", "to", "over", "GB/s", "of its kind", "MB", ""))
        for link in links[:8]:
            expected = link["expected_gb_s"]
            remark = "slow" if link["slow"] else "" if link["judged"] else "not judged"
            speed = f"{link['bandwidth_gb_s']:.2f}", share(link["bandwidth_gb_s"], expected)
            ends = str(link["src"]), str(link["dst"]), link["transport"]
            table.add_row(*ends, *speed, f"{link['size_mb']:.2f}", remark)
        console.print(table)


def _print_utilisation(console: Console, document: Json) -> None:
    means = mean_per_rank(document["waterfall"], (*WATERFALL_PARTS, "e2e_us"))
    if means:
        table = _table("what the device's time goes to", ("rank", *WATERFALL_PARTS.values()))
        for rank, row in list(means.items())[:MAX_ROWS]:
            table.add_row(_rank(rank), *(share(row[key], row["e2e_us"]) for key in WATERFALL_PARTS))
        console.print(table)
    if document["launch_delay"]:
        table = _table(
            "from the CPU's call to the start on the device, in us", ("rank", "calls", "p50", "p90", "p99", "max")
        )
        for row in document["launch_delay"][:MAX_ROWS]:
            figures = (f"{row[key]:,.1f}" for key in ("p50_us", "p90_us", "p99_us", "max_us"))
            table.add_row(_rank(row["rank"]), f"{row['num_launches']:,}", *figures)
        console.print(table)


def _print_named_rules(console: Console, document: Json) -> None:
    if document["training_log"] is not None:
        return
    console.print(Text("rules of published guides, for comparison", style="bold"))
    for rule in document["named_rules"]:
        accused = "names nobody" if rule["accuses"] is None else f"names rank {rule['accuses']}"
        value = "" if rule["value"] is None else f" ({quantity(rule['value'], rule['unit'])})"
        validity = "" if rule["valid"] else f"; not valid here: {rule['why_not']}"
        console.print(Text(f"  {rule['name']}: {accused}{value}{validity}"))


def _print_notes(console: Console, document: Json) -> None:
    for note in notes_of(document, most_ranks=8):
        console.print(Text(f"note: {note}", style="dim"))


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, title_style="bold")
    for place, column in enumerate(columns):
        is_text = place == 0 or column in {"", "operation", "over", "most of it for", "value"}
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    return table


def _say_more(console: Console, count: int) -> None:
    if count > MAX_ROWS:
        console.print(Text(f"  ... and {count - MAX_ROWS} more ranks (--json, --csv or --html has all)", style="dim"))


def _link_ratio(link: Json) -> float:
    expected = link["expected_gb_s"]
    return link["bandwidth_gb_s"] / expected if link["judged"] and expected else float("inf")


def _rank(rank: object) -> str:
    return "?" if rank is None else str(rank)
