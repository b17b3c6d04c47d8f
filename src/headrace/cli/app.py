"""Assembles the verbs and turns errors into one sentence and an exit code."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console

from headrace.cli import bench
from headrace.cli.analyze import analyze
from headrace.cli.compare import compare
from headrace.cli.demo import demo
from headrace.cli.doctor import doctor
from headrace.cli.inspect import inspect
from headrace.cli.prepare import prepare
from headrace.cli.tune import tune
from headrace.errors import ConfigError, FormatError, HeadraceError

EXIT_FAILED = 1
EXIT_USAGE = 2

app = typer.Typer(
    name="headrace",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo)
app.command("inspect")(inspect)
app.command("doctor")(doctor)
app.command("analyze")(analyze)
app.command("compare")(compare)
app.command("tune")(tune)
app.command("prepare")(prepare)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Feed every rank of a training job from shared memory; measure what a step is made of."""


def main() -> None:
    """Entry point of the `headrace` command."""
    try:
        app()
    except HeadraceError as error:
        console = Console(stderr=True, soft_wrap=True)
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False, highlight=False)
        sys.exit(EXIT_USAGE if isinstance(error, (ConfigError, FormatError)) else EXIT_FAILED)
