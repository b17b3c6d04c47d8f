"""`headrace bench`: every figure this project gives about itself, measured again on your machine.

Each verb prints a table and its summary, and writes raw values, environment and date with `--json FILE`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headrace.cli.document import check_writable, write_document
from headrace.cli.values import LONGEST_ROW, MOST, finite, numbers, whole

app = typer.Typer(help="Measure headrace beside what it replaces.", no_args_is_help=True)

LARGEST_TOKEN_ID = 2**31 - 1
MAX_RANKS = 128
"""As many readers as one ring has (headrace._native.MAX_READERS)."""
LARGEST_BYTES = 10**12

CONTENDERS = "broadcast,megatron,replicated,headrace,iceoryx2"

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write raw values and figures.")]
Prefix = Annotated[
    str | None,
    typer.Option("--corpus", metavar="PREFIX", help="A .bin/.idx pair. Else the demo's, else a synthetic one."),
]


def row_lengths(seq: str) -> tuple[int, ...]:
    """What `--seq` names."""
    return numbers(seq, int, "--seq", least=1, most=LONGEST_ROW)


def opened(corpus: str | None) -> str | None:
    """The prefix. ConfigError or FormatError if no store is there, before anything is measured."""
    if corpus is not None:
        from headrace.store import TokenStore

        TokenStore(corpus).close()
    return corpus


@app.command("get-batch")
def get_batch(
    tp: Annotated[str, typer.Option(help="Ranks per group, comma-separated.")] = "2,4",
    seq: Annotated[str, typer.Option(help="Tokens per row.")] = "4096,32768,131072",
    micro_batch_size: Annotated[str, typer.Option(help="Rows per batch.")] = "1",
    pace_ms: Annotated[str, typer.Option(help="Milliseconds a step takes beside get_batch; 0: back to back.")] = "5,0",
    contenders: Annotated[str, typer.Option(help="Who takes part, where it is installed.")] = CONTENDERS,
    steps: Annotated[int, typer.Option(help="Measured steps per contender and pace.")] = 480,
    blocks: Annotated[int, typer.Option(help="In so many blocks; an interval needs six.")] = 8,
    num_slots: Annotated[int, typer.Option(help="Batches that exist at once.")] = 4,
    memory: Annotated[bool, typer.Option(help="Measure host memory too: more starts of the ranks.")] = True,
    corpus: Prefix = None,
    json: Json = None,
) -> None:
    """How long a rank waits for its batch, beside broadcast, Megatron's dataset, replicated loading and iceoryx2."""
    check_writable(json)
    from headrace.bench.get_batch import Plan, run
    from headrace.cli.bench_tables import print_get_batch

    plan = Plan(
        num_ranks=numbers(tp, int, "--tp", most=MAX_RANKS),
        seq_lengths=row_lengths(seq),
        micro_batch_sizes=numbers(micro_batch_size, int, "--micro-batch-size", most=MOST),
        paces_ms=numbers(pace_ms, float, "--pace-ms", most=MOST),
        contenders=tuple(contenders.split(",")),
        num_steps=whole(steps, "--steps"),
        num_blocks=whole(blocks, "--blocks"),
        num_slots=whole(num_slots, "--num-slots", least=2),
        measure_memory=memory,
    )
    console = Console()
    record = run(opened(corpus), plan=plan, report=console.print)
    print_get_batch(record, console)
    write_document(json, record)


@app.command()
def handover(
    readers: Annotated[str, typer.Option(help="Sleeping readers, comma-separated.")] = "1,2,4,8",
    wakes: Annotated[int, typer.Option(help="Blocked hand-overs per contender and number of readers.")] = 400,
    hot: Annotated[int, typer.Option(help="Ready hand-overs, one after the other.")] = 2000,
    after_gap: Annotated[int, typer.Option(help="Ready hand-overs, 5 ms apart.")] = 400,
    idle_s: Annotated[float, typer.Option(help="Seconds for which a waiting rank is watched.")] = 10.0,
    corpus: Prefix = None,
    json: Json = None,
) -> None:
    """What handing a finished batch over costs: ready, blocked and idle, beside a bare futex wake and iceoryx2."""
    check_writable(json)
    from headrace.bench.handover import Plan, run
    from headrace.cli.bench_tables import print_handover

    plan = Plan(
        num_readers=numbers(readers, int, "--readers", most=MAX_RANKS),
        num_wakes=whole(wakes, "--wakes"),
        num_hot=whole(hot, "--hot"),
        num_after_gap=whole(after_gap, "--after-gap"),
        idle_s=finite(idle_s, "--idle-s"),
    )
    console = Console()
    record = run(opened(corpus), plan=plan, report=console.print)
    print_handover(record, console)
    write_document(json, record)


@app.command()
def pack(
    seq: Annotated[str, typer.Option(help="Tokens per row, comma-separated.")] = "4096,32768,131072",
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 120,
    eod: Annotated[int | None, typer.Option(help="The id that ends documents, if the corpus does not show it.")] = None,
    corpus: Prefix = None,
    json: Json = None,
) -> None:
    """What packing token rows costs, beside memcpy of the same bytes, NumPy and Megatron's loop."""
    check_writable(json)
    from headrace.bench.corpus import choose_corpus
    from headrace.bench.pack import run
    from headrace.cli.bench_tables import print_rounds

    lengths, num_rounds = row_lengths(seq), whole(rounds, "--rounds")
    if eod is not None:
        whole(eod, "--eod", least=0, most=LARGEST_TOKEN_ID)
    with choose_corpus(opened(corpus)) as chosen:
        record = run(chosen.prefix, seq_lengths=lengths, num_rounds=num_rounds, eod=eod)
    print_rounds(record, Console(), columns=("text", "seq_length", "mean_documents", "contender", "ns_per_token"))
    write_document(json, record)


@app.command()
def order(
    seq: Annotated[str, typer.Option(help="Tokens per sample, comma-separated.")] = "512,2048,4096,32768",
    documents: Annotated[int, typer.Option(help="Documents of the synthetic corpus.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 20,
    elastic_documents: Annotated[
        int, typer.Option(help="Documents of the index over which an elastic run is continued; 0: leave it out.")
    ] = 10_000_000,
    drawn_samples: Annotated[
        int, typer.Option(help="Samples to draw from a blend of 20 corpora; 0: leave it out.")
    ] = 10_000_000,
    json: Json = None,
) -> None:
    """How long it takes to know which tokens make which sample, beside megatron-core's C++ helper."""
    check_writable(json)
    from headrace.bench.order import run
    from headrace.cli.bench_tables import print_rounds

    record = run(
        num_documents=whole(documents, "--documents"),
        sequence_lengths=row_lengths(seq),
        num_rounds=whole(rounds, "--rounds"),
        num_elastic_documents=whole(elastic_documents, "--elastic-documents", least=0),
        num_drawn_samples=whole(drawn_samples, "--drawn-samples", least=0),
    )
    print_rounds(record, Console(), columns=("what", "sequence_length", "documents_per_sample", "contender"))
    write_document(json, record)


@app.command()
def placement(
    seq: Annotated[str, typer.Option(help="Tokens per row, comma-separated.")] = "4096,32768,131072",
    device: Annotated[str | None, typer.Option(help="As torch names it; default: this machine's accelerator.")] = None,
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 50,
    json: Json = None,
) -> None:
    """What each field costs the CPU, beside making it on the device and waiting for it."""
    check_writable(json)
    from headrace.bench.placement import run
    from headrace.cli.bench_tables import print_placement

    record = run(seq_lengths=row_lengths(seq), device=device, num_rounds=whole(rounds, "--rounds"))
    print_placement(record, Console())
    write_document(json, record)


@app.command()
def measure(
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 40,
    json: Json = None,
) -> None:
    """What measuring a step costs: a span beside two bare clock readings, and a real loop with and without."""
    check_writable(json)
    from headrace.bench.measure import run
    from headrace.cli.bench_tables import print_rounds

    record = run(num_rounds=whole(rounds, "--rounds"))
    print_rounds(record, Console(), columns=("what", "contender"))
    write_document(json, record)


@app.command()
def balance(
    seq: Annotated[str, typer.Option(help="Tokens per row, comma-separated.")] = "8192,32768",
    data_size: Annotated[int, typer.Option(help="Data ranks.")] = 8,
    micro_batches: Annotated[int, typer.Option(help="Micro batches per rank and step.")] = 8,
    micro_batch_size: Annotated[int, typer.Option(help="Rows per micro batch.")] = 1,
    hidden_size: Annotated[int, typer.Option(help="Of the model: how much attention costs beside the rest.")] = 4096,
    steps: Annotated[int, typer.Option(help="Steps of each text and length.")] = 24,
    corpus: Prefix = None,
    json: Json = None,
) -> None:
    """How long steps take by their documents' lengths, dealt out as stored and by cost, and what nothing can beat."""
    check_writable(json)
    from headrace.bench.balance import run
    from headrace.cli.bench_tables import print_balance
    from headrace.order import StepShape

    shape = StepShape(
        data_size=whole(data_size, "--data-size"),
        micro_batches=whole(micro_batches, "--micro-batches"),
        micro_batch_size=whole(micro_batch_size, "--micro-batch-size"),
    )
    record = run(
        opened(corpus),
        seq_lengths=row_lengths(seq),
        shape=shape,
        hidden_size=whole(hidden_size, "--hidden-size"),
        num_steps=whole(steps, "--steps"),
    )
    print_balance(record, Console())
    write_document(json, record)


@app.command()
def traces(
    hta_python: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An interpreter that has HolisticTraceAnalysis.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Measured rounds; an interval needs six.")] = 11,
    large_bytes: Annotated[int, typer.Option(help="Size of the large trace; 0 leaves it out.")] = 1_000_000_000,
    json: Json = None,
) -> None:
    """How long a trace of 54 MB takes to read and break down, beside HolisticTraceAnalysis; eight ranks; 1 GB."""
    check_writable(json)
    from headrace.bench.traces import run
    from headrace.cli.bench_tables import print_traces

    record = run(
        hta_python=hta_python,
        num_rounds=whole(rounds, "--rounds"),
        large_bytes=whole(large_bytes, "--large-bytes", least=0, most=LARGEST_BYTES),
    )
    print_traces(record, Console())
    write_document(json, record)


@app.command()
def device(
    device: Annotated[str, typer.Option(help="As torch names it.")] = "cuda",
    steps: Annotated[int, typer.Option(help="Measured batches per contender.")] = 200,
    json: Json = None,
) -> None:
    """The last metre, on an accelerator: slot copies beside torch's, pinning, get_batch, synchronisations per step."""
    check_writable(json)
    from headrace.bench.device import run
    from headrace.cli.bench_tables import print_rounds

    record = run(device=device, num_steps=whole(steps, "--steps"))
    print_rounds(record, Console(), columns=("what", "contender"))
    write_document(json, record)
