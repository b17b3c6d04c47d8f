"""Assembles the verbs and turns errors into one sentence and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import version
from typing import Annotated, NoReturn

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
EXIT_INTERRUPTED = 130
"""128 and the number of SIGINT, as shells have it."""

REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EACCES: "choose another place, or ask for the right to use this one",
    errno.EPERM: "choose another place, or ask for the right to use this one",
    errno.EROFS: "choose another place",
    errno.EMFILE: "raise the limit with ulimit -n",
}

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
    """Entry point of the `headrace` command.

    What the user asked for or the machine lacks is one sentence on stderr. A defect of headrace keeps its traceback.
    """
    try:
        app()
    except HeadraceError as error:
        leave(
            f"{type(error).__name__}: {error}",
            EXIT_USAGE if isinstance(error, (ConfigError, FormatError)) else EXIT_FAILED,
        )
    except (OSError, MemoryError, UnicodeDecodeError) as error:
        leave(sentence(error), EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def sentence(error: OSError | MemoryError | UnicodeDecodeError) -> str:
    """What the machine refused, and what helps. The verbs foresee most of it and say it better; this is the net."""
    if isinstance(error, MemoryError):
        return f"MemoryError: {str(error) or 'not enough memory'}; ask for less at once, or free some memory"
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        return f"UnicodeDecodeError: a file is no {error.encoding} text: byte 0x{byte:02x} at {error.start}; convert it"
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    remedy = REMEDIES.get(error.errno or 0)
    return f"{type(error).__name__}: {where}{error.strerror or error}" + ("" if remedy is None else f"; {remedy}")


def leave(message: str, exit_code: int) -> NoReturn:
    """Say it on stderr and end the process."""
    Console(stderr=True, soft_wrap=True).print(message, style="red", markup=False, highlight=False)
    try:
        sys.stdout.flush()
    except OSError:
        # What could not be written cannot be written at the end of the process either: it would say so once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(exit_code)
