"""`headrace prepare`: text, or chats, to a token store."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from headrace.cli.document import check_writable, write_document
from headrace.wording import counted

if TYPE_CHECKING:
    from headrace.store.prepare_joined import Prepared

RECORD_VERSION = 1
NUM_BAD_PRINTED = 10


def prepare(
    inputs: Annotated[list[str], typer.Argument(help="Files or folders: .txt, .jsonl (.gz, .zst), .parquet.")],
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="PREFIX", help="Writes PREFIX.bin, PREFIX.idx, and beside them what the ids mean."
        ),
    ],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", "-t", help="A tokenizer.json, a folder with one, or a name on the hub.")
    ],
    key: Annotated[
        str | None, typer.Option(help="Which key of a line, or column: text, or messages, if it is not so called.")
    ] = None,
    append_eod: Annotated[bool, typer.Option("--append-eod", help="End each document with a token.")] = False,
    eod: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Which one (default: what the tokenizer says).")
    ] = None,
    chats: Annotated[
        bool, typer.Option("--chats", help="Lines are chats: messages, or prompt and completion. Writes targets too.")
    ] = False,
    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE", help="Jinja template (default: that of the tokenizer's folder).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Do all of it, also if it is done already.")] = False,
    suffix: Annotated[
        str | None, typer.Option(metavar=".A,.B", help="Files that end so are plain text, too, as .txt is: .md,.py")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Side by side (default: one per core).")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as JSON.")] = None,
) -> None:
    """Turn text into a .bin/.idx pair. A run that was interrupted goes on where it was when called again.

    A pair that was made of the same inputs with the same options stays as it is; any other one is replaced.
    """
    check_writable(json)
    from headrace.store.prepare import prepare as prepare_store

    with shown_progress() as progress:
        prepared = prepare_store(
            inputs,
            output,
            tokenizer=tokenizer,
            text_suffixes=() if suffix is None else suffix.split(","),
            key=key,
            append_eod=append_eod,
            eod=eod,
            chats=chats,
            chat_template=chat_template,
            force=force,
            num_processes=processes,
            progress=progress,
        )
    print_prepared(Console(soft_wrap=True, highlight=False), prepared)
    write_document(json, {"version": RECORD_VERSION, **msgspec.to_builtins(prepared)})


@contextmanager
def shown_progress() -> Iterator[Callable[[int, int], None]]:
    """A bar where there is a terminal; elsewhere a line as each phase begins."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("tokenise")
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    phases: list[str] = []

    def tell(done: int, total: int) -> None:
        phase = "join the parts" if done == total else f"tokenise {total / 1e6:,.1f} MB"
        if phase not in phases:
            phases.append(phase)
            with suppress(OSError):  # nobody reads it any more
                print(f"prepare: {phase}", file=sys.stderr, flush=True)

    yield tell


def print_prepared(console: Console, prepared: Prepared) -> None:
    """What was made, and where it was not what it should be."""
    end = "no end-of-document id"
    if prepared.eod is not None:
        what = "each" if prepared.num_targets is None else "what the assistant says last"
        end = f"{what} ends in id {prepared.eod}"
    console.print(
        f"{prepared.prefix}: {counted(prepared.num_documents, 'document')}, {counted(prepared.num_tokens, 'token')}, "
        f"{prepared.dtype}, {end}",
        markup=False,
    )
    if prepared.num_targets is not None:
        form = "by the chat template" if prepared.has_chat_template else "without a chat template, as they are"
        console.print(f"chats {form}: {prepared.num_targets:,} of the tokens are learnt ({prepared.prefix}.targets)")
    console.print(_origin(prepared))
    if prepared.num_empty:
        console.print(f"{counted(prepared.num_empty, 'document')} {'is' if prepared.num_empty == 1 else 'are'} empty")
    if prepared.num_bad:
        left_out = f"{counted(prepared.num_bad, 'record')} {'is' if prepared.num_bad == 1 else 'are'} not in it:"
        console.print(left_out, style="yellow")
        for bad in prepared.bad[:NUM_BAD_PRINTED]:
            console.print(f"  {bad.path}, line {bad.line}: {bad.reason}", markup=False)


def _origin(prepared: Prepared) -> str:
    """What was reused, and what was in the way."""
    if prepared.unchanged:
        return "there already, of the same inputs, tokenizer and options: nothing to do (--force does it again)"
    if prepared.num_parts_kept:
        done = f"went on: {prepared.num_parts_kept} of {prepared.num_parts} parts were finished by an earlier run"
    else:
        done = "all of it tokenised in this run"
    return f"{done}; the pair that was there is replaced" if prepared.replaced else done
