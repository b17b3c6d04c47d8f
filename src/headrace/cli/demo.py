"""`headrace demo`: the main job, and the shortest proof that it works on this machine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.cli.document import check_folder, check_writable, write_document
from headrace.demo.settings import DemoSettings
from headrace.wording import counted


def demo(
    tp: Annotated[int, typer.Option(help="Ranks of the tensor-parallel group.")] = 2,
    steps: Annotated[int, typer.Option(help="Steps in which every feed delivers.")] = 32,
    seq_length: Annotated[int, typer.Option(help="Tokens per row of a batch.")] = 2048,
    micro_batch_size: Annotated[int, typer.Option(help="Rows per batch.")] = 1,
    model: Annotated[str, typer.Option(help="llama, or moe (mixture of experts).")] = "llama",
    corpus: Annotated[str | None, typer.Option(metavar="PREFIX", help="An existing .bin/.idx pair.")] = None,
    text: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Tokenise the text of this folder.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a profiler trace per rank.")] = None,
    slow_rank: Annotated[int | None, typer.Option(help="With --trace: this rank is late in each step.")] = None,
    slow_ms: Annotated[float, typer.Option(help="How late, in ms. `analyze` names 3 % of a step or more.")] = 200.0,
    seed: Annotated[int, typer.Option(help="Of the order of samples and of the weights.")] = 1234,
) -> None:
    """Train a small transformers model with tensor parallelism on real text, fed three ways in one run, and compare.

    Without arguments: the source code of the installed Python, two ranks, no download.
    """
    settings = DemoSettings(
        tp=tp,
        steps=steps,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        model=model,  # type: ignore[arg-type]
        seed=seed,
        trace_dir=None if trace is None else str(trace.absolute()),
        slow_rank=slow_rank,
        slow_ms=slow_ms,
    )
    check_writable(json)
    check_folder(trace)
    from headrace.demo.run import run_demo
    from headrace.demo.table import print_table

    document = run_demo(settings, corpus_prefix=corpus, text_folder=None if text is None else str(text))
    print_table(document, Console())
    if trace is not None:
        written = f"traces of {counted(tp, 'rank')} in {trace}; next: headrace analyze {shlex.quote(str(trace))}"
        Console(soft_wrap=True, highlight=False).print(written, markup=False)
    write_document(json, document)
