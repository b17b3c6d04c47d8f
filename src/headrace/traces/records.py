"""Records that `headrace.measure` wrote while training (*.jsonl, one file per rank): steps live, without a profiler.

Phases become lanes: forward, backward, optimizer and post are computing, exposed communication is communication that
nothing hides. There are no single collectives, but a step's exposed communication behaves like one long collective of
all ranks: who arrives late stays shortest. So it is entered as one, and the same rule reads it.
"""

from __future__ import annotations

from pathlib import Path

from headrace.measure.phases import COMPUTING
from headrace.measure.record import RankRecords, StepRecord, read_file
from headrace.traces.distributed_info import MAX_RANKS
from headrace.traces.kernel_names import EXPOSED
from headrace.traces.time_bounds import LONGEST_NS
from headrace.traces.timeline import Collective, Group, RankTrace, StepLanes


def is_records(path: Path) -> bool:
    """Looks at the first line."""
    with path.open("rb") as file:
        return file.read(4096).lstrip().startswith(b'{"kind":"run"')


def read_records(path: Path) -> RankTrace:
    """Read one rank's file; warm-up steps are left out. Raises FormatError."""
    records = read_file(path)
    facts = records.facts
    measured = [step for step in records.steps if not step.warmup and step.step_ns is not None]
    steps = [step for step in measured if _is_possible(step)]
    group = Group(name=facts.run, ranks=tuple(range(facts.world_size))) if facts.world_size <= MAX_RANKS else None
    notes = ["the file ends in the middle of a line"] if records.truncated else []
    if len(steps) < len(measured):
        notes.append(f"broken steps that were skipped: {len(measured) - len(steps)}")
    if not any(step.phases_ns.get("communication") is not None for step in steps):
        notes.append("communication was not seen live: nobody can be blamed by waits")
    return RankTrace(
        rank=facts.rank,
        source=str(path),
        format="records",
        device="cpu" if facts.device == "cpu" else "gpu",
        world_size=facts.world_size,
        chip=facts.device_name,
        stage=_stage(records),
        lanes=tuple(_lanes(step) for step in steps),
        collectives=tuple(found for step in steps if (found := _exposed(step, group)) is not None),
        groups=(group,) if group else (),
        num_events=len(records.steps),
        skipped_events=len(measured) - len(steps),
        notes=tuple(notes),
    )


def _is_possible(step: StepRecord) -> bool:
    lengths = (step.step_ns, *step.phases_ns.values())
    return all(length is None or -LONGEST_NS <= length <= LONGEST_NS for length in lengths)


def _stage(records: RankRecords) -> int | None:
    """Unknown beyond a single stage: a record holds the pipeline's size, not the rank's place in it."""
    return 0 if records.facts.pipeline_parallel_size == 1 else None


def _lanes(step: StepRecord) -> StepLanes:
    known = [step.phases_ns.get(name) for name in COMPUTING]
    communication = step.phases_ns.get("communication")
    return StepLanes(
        step=step.step,
        e2e_ns=step.step_ns or 0,
        computing_ns=sum(value for value in known if value is not None),
        communication_ns=communication,
        overlapped_ns=None if communication is None else 0,
        data_ns=step.phases_ns.get("data"),
        host_launch_ns=step.phases_ns.get("scheduling"),
        unknown_ns=step.phases_ns.get("other"),
    )


def _exposed(step: StepRecord, group: Group | None) -> Collective | None:
    waited_ns = step.phases_ns.get("communication")
    if waited_ns is None:
        return None
    return Collective(
        step=step.step, kind=EXPOSED, start_ns=0, duration_ns=waited_ns, group=group, key=f"step {step.step}"
    )
