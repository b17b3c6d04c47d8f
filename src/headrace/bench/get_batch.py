"""How long does a rank wait for its batch, and what does that cost? The measuring body of `headrace bench get-batch`.

Contenders: see get_batch_contenders.py. All deliver the same batches to the same ranks in ONE run, and the first ones
are compared byte for byte. A step is: sleep `pace_ms` (what a training step would take), a barrier of the group, then
get_batch alone is timed on each rank; the group's value is that of its slowest rank. At pace 0 steps come back to back,
and the writers' speed is measured rather than the hand-over.

Interleaved in blocks, not step by step: while one contender delivers, another one's workers would pack ahead on the
same cores, and each would be charged for the other's work. So the background processes of all contenders but one are
stopped (SIGSTOP); at the start of a block they get SETTLE_S to be as far ahead as they may, and the first steps are
kept apart, since they live on that stock. Blocks of all contenders alternate in rotating order, so that a slow minute
of the machine falls on all of them, and ratios are over paired blocks.

How it can mislead: with more processes than cores, the slowest rank also waits for its turn on a core; gloo over the
loopback is the CPU's way of broadcasting and says nothing about NCCL or HCCL; at pace 0 nothing hides the packing,
which all contenders share. After an idle gap a call costs several times what it costs hot, for everybody.
`writer_cpu` is in cores and covers all of a contender's background processes. Host memory is what a group of its own,
with one contender only, needs more once that is up (anonymous and shared pages of all processes, each counted once,
page cache apart): forked workers share pages with their rank until either writes to them, so contenders that live
together cannot be told apart.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from headrace.bench import iceoryx2_ring, megatron_dataset
from headrace.bench.corpus import Corpus, choose_corpus
from headrace.bench.get_batch_case import CONTENDERS, Block, Case, CaseResult, Delivery
from headrace.bench.get_batch_launch import launch
from headrace.bench.get_batch_summary import summarise
from headrace.bench.iceoryx2_ring import Place
from headrace.errors import ConfigError
from headrace.measure.environment import capture_environment
from headrace.measure.statistics import median, p99
from headrace.wording import counted

RECORD_VERSION = 1
ISOLATES = "get_batch of the group's slowest rank, fields in host memory, after a barrier; nothing else of a step"

LEAD_IN_STEPS = 8
"""Twice the batches that any contender may be ahead."""

START_S, STEP_S = 120.0, 1.0
"""A case is given up after so long, plus so much per step: a hundred times what one takes. Nothing is judged by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the user asks for. ConfigError for what cannot be measured."""

    num_ranks: tuple[int, ...] = (2, 4)
    seq_lengths: tuple[int, ...] = (4096, 32768, 131072)
    micro_batch_sizes: tuple[int, ...] = (1,)
    paces_ms: tuple[float, ...] = (5.0, 0.0)
    contenders: tuple[str, ...] = CONTENDERS
    num_steps: int = 480
    """Measured steps per contender and pace."""
    num_blocks: int = 8
    num_slots: int = 4
    measure_memory: bool = True
    """Costs one start of the ranks per contender and case."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "seq_lengths", "micro_batch_sizes"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be one or more numbers of at least 1, got {getattr(self, name)}")
        if not self.paces_ms or min(self.paces_ms) < 0:
            raise ConfigError(f"paces_ms must be one or more numbers of at least 0, got {self.paces_ms}")
        if not 1 <= self.num_blocks <= self.num_steps:
            raise ConfigError(f"num_blocks must lie in [1, num_steps], got {self.num_blocks} of {self.num_steps}")
        unknown = sorted(set(self.contenders) - set(CONTENDERS))
        if unknown or "headrace" not in self.contenders:
            raise ConfigError(f"contenders are headrace and any of {', '.join(CONTENDERS)}, got {self.contenders}")


def run(
    corpus_prefix: str | None = None, *, plan: Plan | None = None, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measures every case of the plan; the record is JSON-able. `report` is told what begins.

    `corpus_prefix` None: see choose_corpus. ConfigError and FormatError for a corpus that does not serve, HeadraceError
    when a rank fails or contenders deliver different bytes.
    """
    plan = plan or Plan()
    rows: list[dict[str, Any]] = []
    checked = 0
    skipped: dict[str, str] = {}
    contenders = tuple(name for name in CONTENDERS if name in plan.contenders)
    for name, module in (("iceoryx2", iceoryx2_ring), ("megatron", megatron_dataset)):
        if name in contenders and (reason := module.missing_reason()) is not None:
            skipped[name] = reason
    with choose_corpus(corpus_prefix) as corpus:
        if "megatron" in contenders and "megatron" not in skipped:
            reason = megatron_dataset.unfit_reason(corpus.prefix)
            skipped |= {} if reason is None else {"megatron": reason}
        contenders = tuple(name for name in contenders if name not in skipped)
        for case in cases(plan, corpus, contenders):
            report(
                f"{counted(case.num_ranks, 'rank')}, {case.source['micro_batch_size']} x {case.source['seq_length']}: "
                f"{', '.join(contenders)}"
            )
            result = launch(case, timeout_s=START_S + STEP_S * case.num_steps * len(contenders))
            checked += result.checked_batches
            rows += rows_of(case, result, added_bytes(case) if plan.measure_memory else {})
    return {
        "version": RECORD_VERSION,
        "isolates": ISOLATES,
        "environment": asdict(capture_environment()),
        "corpus": asdict(corpus) | {"prefix": None},
        "plan": asdict(plan),
        "checked_batches": checked,
        "rows": rows,
        "skipped": skipped,
        "summary": summarise(rows),
    }


def cases(plan: Plan, corpus: Corpus, contenders: tuple[str, ...]) -> Iterator[Case]:
    """One case after another. Each has a folder while it is the current one."""
    steps_per_block = plan.num_steps // plan.num_blocks
    for num_ranks, micro_batch_size, seq_length in product(plan.num_ranks, plan.micro_batch_sizes, plan.seq_lengths):
        place = Place.make() if "iceoryx2" in contenders else None
        folder = tempfile.mkdtemp(prefix="headrace-bench-")
        try:
            unsized = Case(
                num_ranks=num_ranks,
                source={},
                contenders=contenders,
                paces_ms=plan.paces_ms,
                num_blocks=plan.num_blocks,
                steps_per_block=steps_per_block,
                lead_in_steps=LEAD_IN_STEPS,
                num_slots=plan.num_slots,
                iceoryx2_place=None if place is None else asdict(place),
                folder=folder,
            )
            yield with_source(unsized, corpus, micro_batch_size=micro_batch_size, seq_length=seq_length)
        finally:
            if place is not None:
                place.sweep()
            shutil.rmtree(folder, ignore_errors=True)


def with_source(case: Case, corpus: Corpus, *, micro_batch_size: int, seq_length: int) -> Case:
    """The case over as many samples as its steps and its contenders' stocks need."""
    ahead = 4 * case.num_slots
    source = {
        "prefix": corpus.prefix,
        "seq_length": seq_length,
        "micro_batch_size": micro_batch_size,
        "num_samples": (case.num_steps + ahead) * micro_batch_size,
    }
    return replace(case, source=source)


def added_bytes(case: Case) -> dict[str, int]:
    """What each contender needs in memory beyond a group that has none. Blocks."""
    found = {}
    for name in case.contenders:
        alone = replace(case, contenders=(name,), paces_ms=(), folder=tempfile.mkdtemp(dir=case.folder))
        found[name] = launch(alone, timeout_s=START_S).deliveries[name].added_bytes
    return found


def rows_of(case: Case, result: CaseResult, added_bytes: dict[str, int]) -> list[dict[str, Any]]:
    """One row per contender and pace."""
    return [
        row(case, name, delivery, pace_ms, delivery.blocks[str(pace_ms)])
        | {"host_rss_mb": added_bytes[name] / 1e6 if name in added_bytes else None}
        for name, delivery in result.deliveries.items()
        for pace_ms in case.paces_ms
    ]


def row(case: Case, name: str, delivery: Delivery, pace_ms: float, blocks: Sequence[Block]) -> dict[str, Any]:
    """What one contender did at one pace: figures, and the raw values they come from."""
    values_us = [[wait / 1e3 for wait in block.waits_ns] for block in blocks]
    everything = [value for block in values_us for value in block]
    wall_s = sum(block.cost.wall_s for block in blocks)
    bytes_read = sum(block.cost.bytes_read for block in blocks)
    return {
        "contender": name,
        "tp": case.num_ranks,
        "micro_batch_size": case.source["micro_batch_size"],
        "seq_length": case.source["seq_length"],
        "pace_ms": pace_ms,
        "group_median_us": median(everything),
        "group_p99_us": p99(everything),
        "writer_cpu": sum(block.cost.writer_cpu_s for block in blocks) / wall_s,
        "rank_cpu": sum(block.cost.rank_cpu_s for block in blocks) / wall_s / case.num_ranks,
        "bytes_read": bytes_read,
        "bytes_read_per_step": bytes_read / len(everything),
        "num_background_processes": delivery.num_background_processes,
        "block_medians_us": [median(block) for block in values_us],
        "values_us": values_us,
        "lead_in_us": [[wait / 1e3 for wait in block.lead_in_ns] for block in blocks],
    }
