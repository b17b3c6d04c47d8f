"""Assembles the verbs and turns errors into one sentence and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from headrace.cli import bench
from headrace.cli.analyze import analyze
from headrace.cli.compare import compare
from headrace.cli.demo import demo
from headrace.cli.doctor import doctor
from headrace.cli.inspect import inspect
from headrace.cli.prepare import prepare
from headrace.cli.tune import tune
from headrace.cli.values import refuse_arguments
from headrace.errors import ConfigError, FormatError, HeadraceError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""128 and the number of SIGINT, as shells have it."""

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""UsageError, wherever typer keeps it: newer ones bring a click of their own."""

REMEDIES = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EACCES: "choose another place, or ask for the right to use this one",
    errno.EPERM: "choose another place, or ask for the right to use this one",
    errno.EROFS: "choose another place",
    errno.EMFILE: "raise the limit with ulimit -n",
}


class Verbs(TyperGroup):
    """Hands errors of the parser to `main`, which says them in a sentence, not in a frame of five lines."""

    def main(self, *args: Any, **options: Any) -> Any:
        return super().main(*args, **options | {"prog_name": "headrace", "standalone_mode": False})


app = typer.Typer(
    name="headrace",
    cls=Verbs,
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
        refuse_arguments(sys.argv[1:])
        sys.exit(app() or 0)
    except USAGE_ERROR as error:
        leave_usage(error)
    except typer.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except HeadraceError as error:
        leave(
            f"{type(error).__name__}: {error}",
            EXIT_USAGE if isinstance(error, (ConfigError, FormatError)) else EXIT_FAILED,
        )
    except (OSError, MemoryError, UnicodeDecodeError) as error:
        leave(sentence(error), EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def leave_usage(error: Any) -> NoReturn:
    """What the parser refused: its sentence without the frame around it, and where the help is."""
    if type(error).__name__ == "NoArgsIsHelpError":  # the help is what was asked for
        error.show()
        sys.exit(error.exit_code)
    asked = "headrace" if error.ctx is None else error.ctx.command_path
    leave(f"{error.format_message().rstrip('.')}; see {asked} --help", EXIT_USAGE)


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
