"""`headrace analyze PATH...`: traces of one job in, verdict and report out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headrace.cli.document import check_folder, check_writable, write_document
from headrace.cli.values import positive, whole
from headrace.errors import ConfigError
from headrace.report import print_report, write_csv
from headrace.traces import analyze as analyze_traces
from headrace.traces import parse_groups, to_document
from headrace.traces.discover import Input, discover
from headrace.traces.perfetto import write_perfetto
from headrace.traces.reading import Progress as Report

MOST_TOKENS = 10**15
"""A step of all devices together, with a wide margin."""


def analyze(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files or folders with profiler output of one job.")
    ],
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the analysis as JSON.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write one self-contained page.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="DIR", help="Write tables into this folder.")] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option("--perfetto", metavar="FILE", help="Write all ranks on one axis, for ui.perfetto.dev."),
    ] = None,
    groups: Annotated[
        str | None, typer.Option("--groups", metavar='"0,1;2,3"', help="Who communicates, where traces do not say.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that read. Default: one per core.")] = None,
    tokens_per_step: Annotated[
        int | None, typer.Option(help="For a training log: tokens of one optimizer step, all devices.")
    ] = None,
    flops_per_step: Annotated[
        float | None, typer.Option(help="For a training log: operations of one optimizer step, all devices.")
    ] = None,
) -> None:
    """Where does the step's time go, and is a rank or a link slow? Reads PyTorch and Ascend profiles, and logs."""
    for file in (json, html, perfetto):
        check_writable(file)
    check_folder(csv)
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {workers}")
    if tokens_per_step is not None:
        whole(tokens_per_step, "--tokens-per-step", most=MOST_TOKENS)
    if flops_per_step is not None:
        positive(flops_per_step, "--flops-per-step")
    if tokens_per_step is not None or flops_per_step is not None:
        require_training_log(paths)
    if html is not None:
        from headrace.report.html import require_packages, write_html

        require_packages()
    named = parse_groups(groups) if groups is not None else ()
    with _progress() as report:
        analysis = analyze_traces(
            paths, groups=named, keep_spans=perfetto is not None, workers=workers, progress=report
        )
    document = to_document(analysis)
    if analysis.log is not None:
        document["training_log"] |= _rates(analysis.log, tokens_per_step, flops_per_step)
    print_report(Console(), document)
    write_document(json, document)
    if html is not None:
        write_html(html, document)
    if csv is not None:
        write_csv(csv, document)
    if perfetto is not None:
        write_perfetto(perfetto, analysis)


def require_training_log(paths: list[Path]) -> None:
    """ConfigError unless there is one: told by the heads of the files, before gigabytes of traces are read."""
    if discover(paths).inputs[0].kind != "training_log":
        raise ConfigError("--tokens-per-step and --flops-per-step go with a training log, and there is none")


def _rates(log: Any, tokens_per_step: int | None, flops_per_step: float | None) -> dict[str, float | None]:
    return {
        "tokens_per_s": None if tokens_per_step is None else log.tokens_per_s(tokens_per_step),
        "tflops_per_device": None if flops_per_step is None else log.tflops_per_device(flops_per_step),
    }


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar on stderr while files are read; nothing where nobody watches."""
    console = Console(stderr=True)
    columns = (
        TextColumn("reading"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", name="", total=None)

        def advance(entry: Input, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, name=entry.path.name)

        yield advance
