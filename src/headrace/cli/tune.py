"""`headrace tune`: the largest batch of the demo's model that fits into the memory of a device, found by running it."""

from __future__ import annotations

import math
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.document import check_writable, write_document
from headrace.cli.values import LONGEST_ROW, whole
from headrace.errors import ConfigError
from headrace.measure.batch_size import BatchSizeError, BatchSizeResult, batch_size_table, is_out_of_memory
from headrace.measure.environment import capture_environment
from headrace.measure.memory import GIB

if TYPE_CHECKING:
    from headrace.torch.measure.probe import FactoryProbe, TrainStep

RECORD_VERSION = 1
VOCAB_SIZE = 16_384
"""That of the demo's tokenizer."""
RECOMPUTES = ("none", "full")


def tune(
    seq_length: Annotated[int, typer.Option(help="Tokens per row: the longest your data can give.")] = 2048,
    upper: Annotated[int, typer.Option(help="Largest batch to try.")] = 1024,
    multiple: Annotated[int, typer.Option(help="Sizes are multiples of this.")] = 16,
    search: Annotated[str, typer.Option(help="binary (doubling, then halving the gap) or sequential.")] = "binary",
    recompute: Annotated[str, typer.Option(help="none, full, or both comma-separated: one row each.")] = "none",
    model: Annotated[str, typer.Option(help="The demo's llama or moe.")] = "llama",
    device: Annotated[str, typer.Option(help="cpu, cuda, npu, or one of them with a number.")] = "cpu",
    steps: Annotated[int, typer.Option(help="Training steps per size, the optimizer's included; at least 2.")] = 2,
    memory_gib: Annotated[
        float | None,
        typer.Option(help="CPU only: memory the model may take (default: 80 % of what is available)."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every probe.")] = None,
) -> None:
    """Find the largest batch that fits, and the fastest one on the way there. Every size returned was trained."""
    check_writable(json)
    whole(seq_length, "--seq-length", most=LONGEST_ROW)
    whole(multiple, "--multiple")
    whole(upper, "--upper")
    whole(steps, "--steps", least=2)
    if model not in ("llama", "moe"):
        raise ConfigError(f"--model is llama or moe, got {model!r}")
    settings = [one.strip() for one in recompute.split(",")]
    if unknown := sorted(set(settings) - set(RECOMPUTES)):
        raise ConfigError(f"--recompute takes {', '.join(RECOMPUTES)}, got {', '.join(unknown)}")
    if search not in ("binary", "sequential"):
        raise ConfigError(f"--search is binary or sequential, got {search!r}")
    if memory_gib is not None and not device.startswith("cpu"):
        raise ConfigError("--memory-gib limits the CPU; a device's memory limits itself")
    check_device(device)
    budget = memory_budget(memory_gib) if device.startswith("cpu") else None
    probes = DemoProbes(model=model, seq_length=seq_length, device=device, steps=steps)
    with limited_memory(budget):
        table = batch_size_table(
            probes.probe,
            settings,
            multiple=multiple,
            upper=upper,
            search="binary" if search == "binary" else "sequential",
        )
    print_results(Console(), table, seq_length)
    document = {"version": RECORD_VERSION, "kind": "tune", "model": model, "seq_length": seq_length, "device": device}
    document["memory_budget_bytes"] = budget
    document["results"] = {name: as_document(result) for name, result in table.items()}
    write_document(json, document | {"environment": asdict(capture_environment())})
    failed = [result for result in table.values() if isinstance(result, BatchSizeError)]
    if len(failed) == len(table):
        raise failed[0]


class DemoProbes:
    """Probes that build the demo's model anew for each size. One step of one row is run at once, so that threads and
    workspaces exist before memory is limited."""

    def __init__(self, *, model: str, seq_length: int, device: str, steps: int) -> None:
        try:
            from headrace.demo.model import config_of
            from headrace.demo.settings import DemoSettings
        except ImportError as error:
            raise ConfigError(
                f"headrace tune needs the demo's packages: pip install 'headrace[demo]' ({error})"
            ) from error
        settings = DemoSettings(tp=1, seq_length=seq_length, model="moe" if model == "moe" else "llama")
        self.config = config_of(settings, VOCAB_SIZE)
        self.seq_length, self.device, self.steps = seq_length, device, steps
        try:
            self.build("none")(1)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise BatchSizeError(1, f"{type(error).__name__}: {error}".splitlines()[0]) from error

    def probe(self, recompute: str) -> FactoryProbe:
        """The probe of one recompute setting."""
        from headrace.torch.measure.probe import FactoryProbe

        return FactoryProbe(lambda: self.build(recompute), device=self.device, steps=self.steps)

    def build(self, recompute: str) -> TrainStep:
        """A fresh model and optimizer, as a train step on random tokens of full length."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(self.config).to(self.device)
        model.train()
        if recompute == "full":
            model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters())

        def train_step(batch_size: int) -> None:
            tokens = torch.randint(0, VOCAB_SIZE, (batch_size, self.seq_length), device=self.device)
            optimizer.zero_grad(set_to_none=True)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()

        return train_step


@contextmanager
def limited_memory(budget_bytes: int | None) -> Iterator[None]:
    """Let this process map at most `budget_bytes` more than it has now: allocations beyond it raise instead of being
    answered by the kernel's out-of-memory killer. None: no limit."""
    if budget_bytes is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped + budget_bytes
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def memory_budget(memory_gib: float | None) -> int:
    """Bytes that the model may take. None: 80 % of what is left here, the rest is everybody else's. ConfigError for a
    budget that is no amount of memory, or more than is left: the kernel would end the process before the limit does."""
    from headrace.shm.limits import headrooms

    free = min(headrooms(), key=lambda headroom: headroom.free_bytes)
    if memory_gib is None:
        return int(0.8 * free.free_bytes)
    if not math.isfinite(memory_gib) or memory_gib <= 0:
        raise ConfigError(f"--memory-gib must be a positive number, got {memory_gib:g}")
    if memory_gib * GIB > free.free_bytes:
        raise ConfigError(
            f"--memory-gib asks for {memory_gib:g}, but {free.name} has {free.free_bytes / GIB:.1f} GiB left; lower it"
        )
    return round(memory_gib * GIB)


def check_device(device: str) -> None:
    """ConfigError unless torch can train on it here. Imports torch only for accelerators."""
    if not re.fullmatch(r"(cpu|cuda|npu)(:\d+)?", device):
        raise ConfigError(f"--device is cpu, cuda or npu, also with a number as in cuda:0; got {device!r}")
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return
    try:
        from headrace.torch.measure.devices import backend_of, device_module
    except ImportError as error:
        raise ConfigError(f"headrace tune needs the demo's packages: pip install 'headrace[demo]' ({error})") from error
    backend_of(device)
    count = device_module(kind).device_count()
    if number and int(number) >= count:
        raise ConfigError(f"--device {device} is not there: this machine has {count} of them, {kind}:0 is the first")


def print_results(console: Console, table: dict[str, BatchSizeResult | BatchSizeError], seq_length: int) -> None:
    """Every probe in the order it was run, and what came of it."""
    for recompute, result in table.items():
        if isinstance(result, BatchSizeError):
            console.print(f"recompute {recompute}: {result}", style="red", markup=False)
            continue
        probes = Table(title=f"recompute {recompute}, rows of {seq_length} tokens", title_justify="left")
        for column in ("batch", "fits", "samples/s", "tokens/s", ""):
            probes.add_column(column, justify="right" if column in ("batch", "samples/s", "tokens/s") else "left")
        for one in result.tried:
            rate = one.samples_per_s
            speeds = ("", "") if rate is None else (f"{rate:,.2f}", f"{rate * seq_length:,.0f}")
            probes.add_row(str(one.batch_size), "yes" if one.fits else "no", *speeds, Text(one.reason or ""))
        console.print(probes)
        limit = " (the limit of --upper)" if result.reached_upper else ""
        note = f"; {result.note}" if result.note else ""
        console.print(
            f"largest {result.largest}{limit}{note}; fastest {result.fastest}; "
            f"{result.smallest_within} is the smallest within {result.tolerance:.0%} of the fastest",
            markup=False,
        )


def as_document(result: BatchSizeResult | BatchSizeError) -> dict[str, Any]:
    """A row of the table as JSON."""
    if isinstance(result, BatchSizeError):
        return {"largest": None, "smallest_tried": result.smallest_tried, "error": str(result)}
    return asdict(result)
