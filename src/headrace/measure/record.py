"""What is kept of a run: one JSON line per step and rank, raw values, with a version and the circumstances.

A folder holds one run, a file in it one rank. Its first line says what ran, every further line is one step, or one
window with what is only looked at now and then (memory, the slow rank). Rates and ratios are not stored: whoever reads
computes them, by the same functions.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from headrace.errors import ConfigError, FormatError
from headrace.measure.environment import Environment
from headrace.measure.flops import Attention, ModelShape, Recompute
from headrace.measure.memory import MemoryUse
from headrace.measure.phases import NO_QUEUE, NO_SPAN, StepTimes, Timeline
from headrace.measure.slow_rank import SlowRank

Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(gt=0)]
"""What a file may hold: a figure outside is no record (FormatError), so that nobody computes with it."""

VERSION = 1
"""Raise it when a field changes its meaning or goes; new fields with a default need no new version."""


class RunFacts(msgspec.Struct, frozen=True, kw_only=True, tag="run", tag_field="kind"):
    """First line of a file: which run, which rank, on what, under which circumstances. None: not known."""

    run: str
    """The same on all ranks of a run and different for every start."""
    rank: Whole
    world_size: Positive
    """All devices of the job."""
    data_rank: Whole = 0
    data_parallel_size: Positive = 1
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    context_parallel_size: Positive = 1
    num_nodes: Positive | None = None
    device: str = "cpu"
    device_name: str | None = None
    dtype: str | None = None
    peak_flops: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Dense operations per second of one device for `dtype`."""
    sequence_length: Positive | None = None
    attention: Attention = "causal"
    recompute: Recompute = "none"
    model: str | None = None
    """Class of the model that was given."""
    num_parameters: Whole | None = None
    """Of the model on this rank: a shard counts its own."""
    shape: ModelShape | None = None
    warmup_steps: Whole = 0
    label: str | None = None
    """Whatever a person wants to tell runs apart by."""
    started_unix_s: float = 0.0
    environment: Environment | None = None
    version: int = VERSION


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind", omit_defaults=True):
    """One step of one rank, as measured. Counts are this rank's, over all micro batches of the step.

    A phase that is null had no span, unless `reasons` says something else.
    """

    run: str
    rank: Whole
    step: Whole
    warmup: bool = False
    timeline: Timeline = "host"
    step_ns: Positive | None = None
    phases_ns: dict[str, int | None] = {}
    data_parts_ns: dict[str, int] = {}
    host_ns: dict[str, int] = {}
    """Where the host's time went; only where the phases are the device's."""
    excluded_ns: dict[str, int] = {}
    reasons: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    samples: Whole | None = None
    tokens: Whole | None = None
    padded_tokens: Whole | None = None
    squared_lengths: Whole | None = None
    """Sum over documents of length^2."""
    model_flops: Whole | None = None
    """Of this rank's samples, forward and backward, without recompute; all of the model, not one rank's part of it."""
    hardware_flops: Whole | None = None


class WindowRecord(msgspec.Struct, frozen=True, kw_only=True, tag="window", tag_field="kind", omit_defaults=True):
    """What is looked at once per window, which ends with `step`."""

    run: str
    rank: Whole
    step: Whole
    memory: MemoryUse | None = None
    slow_rank: SlowRank | None = None


Line: TypeAlias = RunFacts | StepRecord | WindowRecord
ENCODER = msgspec.json.Encoder()
DECODER = msgspec.json.Decoder(Line)


def new_run_id() -> str:
    """Sortable by start, different for every start."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def step_record(
    facts: RunFacts,
    times: StepTimes,
    *,
    samples: int | None = None,
    tokens: int | None = None,
    padded_tokens: int | None = None,
    squared_lengths: int | None = None,
    model_flops: int | None = None,
    hardware_flops: int | None = None,
) -> StepRecord:
    """The line of one measured step."""
    return StepRecord(
        run=facts.run,
        rank=facts.rank,
        step=times.index,
        warmup=times.index < facts.warmup_steps,
        timeline=times.timeline,
        step_ns=times.step_ns,
        phases_ns=times.phases_ns,
        data_parts_ns=times.data_parts_ns,
        host_ns=times.host_ns,
        excluded_ns=times.excluded_ns,
        reasons={name: reason for name, reason in times.reasons.items() if reason not in (NO_SPAN.get(name), NO_QUEUE)},
        notes=times.notes,
        samples=samples,
        tokens=tokens,
        padded_tokens=padded_tokens,
        squared_lengths=squared_lengths,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
    )


class RecordWriter:
    """Appends lines to `folder/<run>/rank<NNNNN>.jsonl`; a new start of a job never touches an older one's files.

    Raises OSError while being made when the folder cannot be written. Lines are buffered until `flush`.
    """

    def __init__(self, folder: Path, facts: RunFacts) -> None:
        self.path = Path(folder) / facts.run / f"rank{facts.rank:05d}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("xb")
        self.write(facts)
        self.flush()

    def write(self, line: Line) -> None:
        """Append one line. Raises OSError when the disk is full."""
        self.file.write(ENCODER.encode(line) + b"\n")

    def flush(self) -> None:
        """Hand the buffered lines to the system: they survive the end of this process."""
        self.file.flush()

    def close(self) -> None:
        """Flush and close; further calls do nothing."""
        self.file.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecords:
    """One file: one rank of one run."""

    path: Path
    facts: RunFacts
    steps: tuple[StepRecord, ...]
    windows: tuple[WindowRecord, ...]
    truncated: bool
    """The last line is cut off: the process was killed while it wrote."""


def read_file(path: Path) -> RankRecords:
    """Read one rank's file. Raises FormatError with the line for anything that is not a record of this version."""
    lines = Path(path).read_bytes().split(b"\n")
    truncated = bool(lines.pop())
    if not lines:
        raise FormatError(f"{path} is empty: no run was recorded")
    facts = decode_facts(path, lines[0])
    steps: list[StepRecord] = []
    windows: list[WindowRecord] = []
    for number, text in enumerate(lines[1:], start=2):
        line = decode(path, number, text)
        if isinstance(line, RunFacts) or line.run != facts.run or line.rank != facts.rank:
            raise FormatError(f"{path}:{number} belongs to another run or rank: one file holds one rank of one run")
        if isinstance(line, StepRecord):
            steps.append(line)
        else:
            windows.append(line)
    return RankRecords(path=Path(path), facts=facts, steps=tuple(steps), windows=tuple(windows), truncated=truncated)


def decode(path: Path, number: int, text: bytes) -> Line:
    """One line, or a FormatError that says what is wrong with it."""
    try:
        return DECODER.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FormatError(f"{path}:{number} is not a record headrace wrote: {error}") from error


class Opening(msgspec.Struct):
    """As much of a first line as every version has."""

    kind: str
    version: int


def decode_facts(path: Path, text: bytes) -> RunFacts:
    """The first line. Its version is looked at first: another version may have other fields."""
    try:
        opening = msgspec.json.decode(text, type=Opening)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FormatError(f"{path}:1 is not the description of a run: {error}") from error
    if opening.kind == "run" and opening.version != VERSION:
        raise FormatError(f"{path} has version {opening.version}, this headrace reads version {VERSION}")
    facts = decode(path, 1, text)
    if not isinstance(facts, RunFacts):
        raise FormatError(f"{path}:1 is not the description of a run but a {opening.kind}")
    return facts


def read_run(path: Path) -> tuple[RankRecords, ...]:
    """All ranks of one run, by rank: from a file, from a run's folder, or from a folder that holds one run's folder.

    Raises FormatError when the files are of several runs or a rank occurs twice, ConfigError when there are none.
    """
    path = Path(path)
    files: Sequence[Path] = [path] if path.is_file() else sorted(path.glob("*.jsonl")) or sorted(path.glob("*/*.jsonl"))
    if not files:
        raise ConfigError(f"{path} holds no records (*.jsonl): give the folder a run was recorded into")
    ranks = sorted((read_file(file) for file in files), key=lambda one: one.facts.rank)
    runs = sorted({one.facts.run for one in ranks})
    if len(runs) > 1:
        raise FormatError(f"{path} holds several runs ({', '.join(runs)}): give the folder of one of them")
    numbers = [one.facts.rank for one in ranks]
    if len(set(numbers)) < len(numbers):
        raise FormatError(f"{path} holds a rank twice: {numbers}")
    return tuple(ranks)
