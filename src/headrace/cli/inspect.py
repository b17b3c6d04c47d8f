"""`headrace inspect`: what is in a token store, and what a packed batch made from it looks like."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import dropwhile, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.document import check_writable, write_document
from headrace.cli.values import whole
from headrace.errors import ConfigError
from headrace.wording import counted

if TYPE_CHECKING:
    from headrace.cli.inspect_sample import Sample
    from headrace.feed.packed_tokens import PackedTokens
    from headrace.store import TokenStore

RECORD_VERSION = 1
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
BAR_WIDTH = 40


def inspect(
    prefix: Annotated[
        list[str],
        typer.Argument(
            help="Path of the .bin/.idx pair without the ending; or a blend: WEIGHT PREFIX WEIGHT PREFIX ..."
        ),
    ],
    sample: Annotated[
        int | None, typer.Option(metavar="I", help="Show the micro batch that starts at sample I.")
    ] = None,
    seq_length: Annotated[int | None, typer.Option(metavar="S", help="Tokens per row; needed with --sample.")] = None,
    micro_batch_size: Annotated[int, typer.Option(help="Rows of the micro batch.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the order of samples.")] = 1234,
    num_samples: Annotated[int | None, typer.Option(help="Samples of the run (None: one epoch).")] = None,
    order: Annotated[str, typer.Option(help="megatron or elastic.")] = "megatron",
    documents: Annotated[str, typer.Option(help="cut, or whole.")] = "cut",
    targets: Annotated[
        list[str] | None, typer.Option(metavar="PREFIX", help="The targets of chats; with a blend once for each.")
    ] = None,
    split: Annotated[str | None, typer.Option(help='Weights of train, valid, test such as "969,30,1".')] = None,
    split_name: Annotated[str, typer.Option(help="Which part of --split.")] = "train",
    eod: Annotated[int | None, typer.Option(help="End-of-document id (default: what the manifest says).")] = None,
    eod_mask_loss: Annotated[bool, typer.Option(help="What follows an end of document is no target.")] = False,
    cp_size: Annotated[int, typer.Option(help="Show the part of one of so many context-parallel ranks.")] = 1,
    cp_rank: Annotated[int, typer.Option(help="Which one.")] = 0,
    cut: Annotated[str, typer.Option(help="documents, rows, contiguous or hybrid.")] = "documents",
    ulysses_size: Annotated[int, typer.Option(help="For --cut hybrid.")] = 1,
    stage: Annotated[str, typer.Option(help="Pipeline stage: only, first, middle, last or mtp.")] = "only",
    mtp_depth: Annotated[int, typer.Option(help="Prediction depths.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Show what is in token stores: counts, lengths, and with --sample one packed micro batch as a model gets it."""
    if (sample is None) != (seq_length is None):
        raise ConfigError("--sample and --seq-length belong together: which sample, and how many tokens per row")
    check_writable(json)
    if num_samples is not None:
        whole(num_samples, "--num-samples")
    from headrace.feed.packed_tokens import PackedTokens

    source = PackedTokens.from_data_path(
        prefix,
        # Of no importance without a sample, nor is where a blend would end.
        seq_length=1 if seq_length is None else seq_length,
        micro_batch_size=micro_batch_size,
        seed=seed,
        num_samples=num_samples,
        order=order,
        documents=documents,
        targets=targets or None,
        split=split,
        split_name=split_name,
        eod=eod,
        eod_mask_loss=eod_mask_loss,
    )
    view = {
        "cp_size": cp_size, "cp_rank": cp_rank, "cut": cut, "ulysses_size": ulysses_size,
        "stage": stage, "mtp_depth": mtp_depth,
    }  # fmt: skip
    write_document(json, show(source, sample, view))


def show(source: PackedTokens, sample: int | None, asked: dict[str, Any]) -> dict[str, Any]:
    """Print a source's stores and, if one is named, a sample and what a view takes of it. The same as a document."""
    from headrace.cli.inspect_sample import SampleRequest, take_sample
    from headrace.cli.inspect_view import describe_view
    from headrace.feed.corpora import open_stores

    with ExitStack() as resources:
        stores = open_stores(source.blend.prefixes, resources)
        taken = view = None
        # A sample that cannot be taken is said before a large store is read for its histogram.
        if sample is not None:
            taken = take_sample(stores, SampleRequest(sample=sample, source=source))
            view = describe_view(taken, **asked)
        corpora = [describe(store) for store in stores]
    document = corpora[0] if len(corpora) == 1 else document_of_blend(corpora, source.blend.weights)
    console = Console()
    for number, one in enumerate(document.get("corpora", corpora)):
        print_counts(console, one, f"corpus {number}, " if len(corpora) > 1 else "")
        if taken is None:  # who asks for a sample has not asked for these
            print_lengths(console, one)
    if taken is not None:
        add_sample(console, document, taken, view)
    return document


def add_sample(console: Console, document: dict[str, Any], taken: Sample, view: dict[str, Any] | None) -> None:
    """The micro batch and what one rank takes of it, into the document and onto the terminal."""
    from headrace.cli.inspect_view import print_view

    document["sample"] = msgspec.to_builtins(taken)
    print_sample(console, taken, num_corpora=len(document.get("corpora", [document])))
    if view is not None:
        document["view"] = view
        print_view(console, view)


def document_of_blend(corpora: list[dict[str, Any]], weights: Sequence[float] | None) -> dict[str, Any]:
    """Several stores in one document: what `describe` says of each, and its weight."""
    of_each = [None] * len(corpora) if weights is None else weights
    weighted = [one | {"weight": weight} for one, weight in zip(corpora, of_each, strict=True)]
    return {"version": RECORD_VERSION, "corpora": weighted}


def describe(store: TokenStore) -> dict[str, Any]:
    """What the JSON document says about a store."""
    import numpy as np

    lengths = store.lengths
    quantiles = np.quantile(lengths, QUANTILES, method="inverted_cdf").tolist() if len(lengths) else []
    exponents = np.frexp(np.maximum(lengths, 1))[1] - 1
    counts = np.bincount(exponents).tolist() if len(lengths) else []
    lowest, highest = store.token_id_range
    return {
        "version": RECORD_VERSION,
        "prefix": store.prefix,
        "fingerprint": store.fingerprint(),
        "dtype": store.dtype.name,
        "documents": store.num_documents,
        "sequences": store.num_sequences,
        "tokens": store.num_tokens,
        "lowest_token_id": lowest if store.num_tokens else None,
        "highest_token_id": highest if store.num_tokens else None,
        "length_quantiles": [{"quantile": q, "tokens": int(v)} for q, v in zip(QUANTILES, quantiles, strict=False)],
        # Half-open ranges that double; the first also holds empty sequences.
        "length_histogram": [
            {"from": 2**exponent if exponent else 0, "below": 2 ** (exponent + 1), "sequences": number}
            for exponent, number in enumerate(counts)
        ],
    }


def print_counts(console: Console, document: dict[str, Any], name: str) -> None:
    """Which store it is, and its share of a blend; documents and tokens."""
    weight = "" if document.get("weight") is None else f"weight {document['weight']:g}: "
    console.print(Text.assemble(name, weight, (document["prefix"], "bold")), soft_wrap=True)
    sequences = (
        "" if document["sequences"] == document["documents"] else f" in {counted(document['sequences'], 'sequence')}"
    )
    documents, tokens = counted(document["documents"], "document"), counted(document["tokens"], "token")
    console.print(f"{documents}{sequences}, {tokens}, {document['dtype']}")
    if document["tokens"]:
        console.print(f"token ids {document['lowest_token_id']} to {document['highest_token_id']}")


def print_lengths(console: Console, document: dict[str, Any]) -> None:
    """Quantiles and a histogram of the lengths; nothing of an empty store."""
    if not document["tokens"]:
        return
    table = Table(title="tokens per sequence", title_justify="left")
    for entry in document["length_quantiles"]:
        table.add_column({0.0: "min", 0.5: "median", 1.0: "max"}.get(entry["quantile"], f"{entry['quantile']:.0%}"))
    table.add_row(*(f"{entry['tokens']:,}" for entry in document["length_quantiles"]))
    console.print(table)
    bars = Table(box=None, show_header=False, padding=(0, 1))
    most = max(entry["sequences"] for entry in document["length_histogram"])
    # From the shortest sequence there is.
    for entry in dropwhile(lambda entry: not entry["sequences"], document["length_histogram"]):
        width = -(-entry["sequences"] * BAR_WIDTH // most)
        bars.add_row(f"{entry['from']:,} -", f"{entry['below'] - 1:,}", f"{entry['sequences']:,}", "█" * width)
    console.print(bars)


def print_sample(console: Console, sample: Sample, *, num_corpora: int) -> None:
    """A heading per row, two lines per document in it, then what a kernel and a loss see."""
    console.print(f"\nsamples {sample.first_sample} to {sample.last_sample} of {sample.samples_in_order:,}")
    if num_corpora > 1:
        _print_samples_of_corpora(console, sample, num_corpora)
    for row, segments in groupby(sample.segments, lambda segment: segment.row):
        console.print(f"[bold]row {row}: sample {sample.first_sample + row}[/bold]", highlight=False)
        for segment in segments:
            corpus = f"corpus {segment.corpus}, " if num_corpora > 1 else ""
            console.print(
                f"  tokens {segment.begin} - {segment.end - 1}: {corpus}document {segment.document} "
                f"from token {segment.offset:,}, position ids {segment.first_position} - {segment.last_position}, "
                f"{segment.num_targets} of {segment.end - segment.begin} are targets",
                highlight=False,
            )
            console.print(Text(f"      {segment.shown}", style="dim"), no_wrap=True, overflow="ellipsis")
    console.print(f"cu_seqlens {sample.cu_seqlens}", highlight=False)
    console.print(f"max_seqlen {sample.max_seqlen}, {sample.num_targets} of {sample.num_positions} are targets")
    if sample.note:
        console.print(sample.note, style="yellow", highlight=False)


def _print_samples_of_corpora(console: Console, sample: Sample, num_corpora: int) -> None:
    """A line for every corpus of a blend, also for one that none of these samples is of."""
    for corpus in range(num_corpora):
        rows = sorted({segment.row for segment in sample.segments if segment.corpus == corpus})
        own = ", ".join(str(sample.first_sample + row) for row in rows)
        console.print(f"corpus {corpus}: {f'in samples {own}' if rows else 'in none of them'}", highlight=False)
