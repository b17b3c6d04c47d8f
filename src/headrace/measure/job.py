"""All ranks of a recorded run as one job: whose samples count, and what the run was, for those who compare runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from headrace.measure.linearity import ScalingPoint
from headrace.measure.phases import NO_QUEUE, PHASES
from headrace.measure.record import RankRecords, RunFacts, StepRecord
from headrace.measure.summary import Summary, Totals, plus, summarise
from headrace.wording import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run seen as a whole. Counts in `steps` are the whole job's; times are means over the ranks."""

    facts: RunFacts
    """Rank 0's (or the lowest recorded rank's), with data_parallel_size 1 because counts are already summed."""
    recorded_facts: RunFacts
    steps: tuple[StepRecord, ...]
    """Steps that every recorded rank has."""
    num_ranks: int
    peak_allocated_bytes: int | None
    """Largest over ranks and windows."""
    peak_reserved_bytes: int | None
    peak_rss_bytes: int | None
    notes: tuple[str, ...]

    @property
    def counting_steps(self) -> tuple[StepRecord, ...]:
        """Those that are not warm-up and have a time."""
        return tuple(step for step in self.steps if not step.warmup and step.step_ns)

    def summary(self) -> Summary:
        """The figures of the job over all steps that count."""
        totals = Totals()
        for step in self.steps:
            if not step.warmup:
                totals.add(step)
        return summarise(totals, self.facts)


def join_ranks(ranks: Sequence[RankRecords]) -> Job:
    """Bring the ranks of one run (from `read_run`, at least one) together."""
    facts = ranks[0].facts
    notes = [f"{one.path.name} ends in the middle of a line" for one in ranks if one.truncated]
    by_step = [{step.step: step for step in one.steps} for one in ranks]
    common = sorted(set.intersection(*(set(steps) for steps in by_step)))
    longest = max(len(steps) for steps in by_step)
    if len(common) < longest:
        num_left_out = longest - len(common)
        are = "is" if num_left_out == 1 else "are"
        notes.append(f"{counted(num_left_out, 'step')} {are} not recorded by every rank and {are} left out")
    if len(ranks) < facts.world_size:
        notes.append(f"{len(ranks)} of {facts.world_size} ranks were recorded")
    # Ranks that share their data (tensor, pipeline, context parallel) count the same samples: one of them speaks.
    speakers: dict[int, int] = {}
    for position, one in enumerate(ranks):
        speakers.setdefault(one.facts.data_rank, position)
    scale = facts.data_parallel_size / len(speakers)
    if scale != 1.0:
        notes.append(f"{len(speakers)} of {facts.data_parallel_size} data-parallel ranks were recorded: counts scaled")
    steps = tuple(
        join_step(
            [steps[index] for steps in by_step], [by_step[position][index] for position in speakers.values()], scale
        )
        for index in common
    )
    memory = [window.memory for one in ranks for window in one.windows if window.memory is not None]
    device = [use.device for use in memory if use.device is not None]
    return Job(
        facts=msgspec.structs.replace(facts, data_parallel_size=1),
        recorded_facts=facts,
        steps=steps,
        num_ranks=len(ranks),
        peak_allocated_bytes=max((use.peak_allocated_bytes for use in device), default=None),
        peak_reserved_bytes=max((use.peak_reserved_bytes for use in device), default=None),
        peak_rss_bytes=max((use.host.peak_rss_bytes for use in memory if use.host is not None), default=None),
        notes=tuple(notes),
    )


def join_step(ranks: Sequence[StepRecord], speakers: Sequence[StepRecord], scale: float) -> StepRecord:
    """One step of all ranks: mean times, counts summed over those whose samples are different."""
    times = [step.step_ns for step in ranks if step.step_ns is not None]
    whole = round(sum(times) / len(times)) if len(times) == len(ranks) else None
    phases: dict[str, int | None] = {}
    for name in PHASES:
        values = [value for step in ranks if (value := step.phases_ns.get(name)) is not None]
        phases[name] = round(sum(values) / len(values)) if len(values) == len(ranks) else None
    if whole is not None:
        known = sum(value for name, value in phases.items() if value is not None and name != "other")
        phases["other"] = whole - known
    first = ranks[0]
    return StepRecord(
        run=first.run,
        rank=first.rank,
        step=first.step,
        warmup=first.warmup,
        timeline=first.timeline,
        step_ns=whole,
        phases_ns=phases,
        data_parts_ns=first.data_parts_ns,
        excluded_ns=first.excluded_ns,
        reasons={name: reason for step in reversed(ranks) for name, reason in step.reasons.items()},
        notes=tuple(dict.fromkeys(note for step in ranks for note in step.notes)),
        samples=summed([step.samples for step in speakers], scale),
        tokens=summed([step.tokens for step in speakers], scale),
        padded_tokens=summed([step.padded_tokens for step in speakers], scale),
        squared_lengths=summed([step.squared_lengths for step in speakers], scale),
        model_flops=summed([step.model_flops for step in speakers], scale),
        hardware_flops=summed([step.hardware_flops for step in speakers], scale),
    )


def summed(counts: Sequence[int | None], scale: float) -> int | None:
    """The sum over data-parallel ranks, or None when one of them did not count."""
    total: int | None = 0
    for count in counts:
        total = plus(total, count)
    return None if total is None else round(total * scale)


def scaling_point(job: Job) -> ScalingPoint:
    """What linearity needs to know of a run."""
    facts, summary = job.recorded_facts, job.summary()
    steps = job.counting_steps
    samples = [step.samples for step in steps]
    per_rank = None
    if steps and None not in samples:
        per_rank = sum(count for count in samples if count is not None) / len(steps) / facts.data_parallel_size
    scheduling, other = summary.phases["scheduling"], summary.phases["other"]
    rate = summary.throughput
    return ScalingPoint(
        num_devices=facts.world_size,
        num_nodes=facts.num_nodes,
        tokens_per_s=rate.tokens_per_s,
        samples_per_s=rate.samples_per_s,
        step_seconds=summary.mean_step_s,
        samples_per_data_rank=per_rank,
        data_parallel_size=facts.data_parallel_size,
        tensor_parallel_size=facts.tensor_parallel_size,
        pipeline_parallel_size=facts.pipeline_parallel_size,
        context_parallel_size=facts.context_parallel_size,
        sequence_length=facts.sequence_length,
        real_token_share=None if rate.padding_ratio is None else 1.0 - rate.padding_ratio,
        recompute=facts.recompute,
        dtype=facts.dtype,
        device_name=facts.device_name,
        model=None if facts.shape is None else sha256(msgspec.json.encode(facts.shape)).hexdigest()[:12],
        data_share=summary.phases["data"].share,
        host_share=other.share if scheduling.reason == NO_QUEUE else scheduling.share,
    )
