"""`headrace prepare`: text, or chats, to a token store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from headrace.cli.document import check_writable, write_document

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
    processes: Annotated[int | None, typer.Option(min=1, help="Side by side (default: one per core).")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as JSON.")] = None,
) -> None:
    """Turn text into a .bin/.idx pair. A run that was interrupted goes on where it was when called again.

    A pair that was made of the same inputs with the same options stays as it is; any other one is replaced.
    """
    check_writable(json)
    from headrace.store.prepare import prepare as prepare_store

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("tokenise")
        prepared = prepare_store(
            inputs,
            output,
            tokenizer=tokenizer,
            key=key,
            append_eod=append_eod,
            eod=eod,
            chats=chats,
            chat_template=chat_template,
            force=force,
            num_processes=processes,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    print_prepared(Console(soft_wrap=True, highlight=False), prepared)
    write_document(json, {"version": RECORD_VERSION, **msgspec.to_builtins(prepared)})


def print_prepared(console: Console, prepared: Prepared) -> None:
    """What was made, and where it was not what it should be."""
    end = "no end-of-document id"
    if prepared.eod is not None:
        what = "each" if prepared.num_targets is None else "what the assistant says last"
        end = f"{what} ends in id {prepared.eod}"
    console.print(
        f"{prepared.prefix}: {prepared.num_documents:,} documents, {prepared.num_tokens:,} tokens, {prepared.dtype}, "
        f"{end}",
        markup=False,
    )
    if prepared.num_targets is not None:
        form = "by the chat template" if prepared.has_chat_template else "without a chat template, as they are"
        console.print(f"chats {form}: {prepared.num_targets:,} of the tokens are learnt ({prepared.prefix}.targets)")
    console.print(_origin(prepared))
    if prepared.num_empty:
        console.print(f"{prepared.num_empty:,} documents are empty")
    if prepared.num_bad:
        console.print(f"{prepared.num_bad:,} records are not in it:", style="yellow")
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
