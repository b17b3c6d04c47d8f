"""From step records to the figures people read: of a window, of a run, of all ranks of a run. Sums over sums.

The same functions serve the line printed while training, the summary at its end, and the comparison of two runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.measure.bandwidth import TrainingEfficiency, training_efficiency
from headrace.measure.flops import Utilisation, utilisation
from headrace.measure.phases import NO_QUEUE, NO_SPAN, PHASES
from headrace.measure.record import RunFacts, StepRecord
from headrace.measure.throughput import Throughput, rates

MAX_NOTES = 20
"""Different notes kept; a note with a changing number in it must not grow without end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """One phase over a window: mean seconds per step and share of the step time. None when any step lacks it."""

    mean_s: float | None
    share: float | None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a window or a run amounts to. `first_step` and `last_step` are those that were timed and not warm-up."""

    first_step: int | None
    last_step: int | None
    num_steps: int
    mean_step_s: float | None
    throughput: Throughput
    phases: dict[str, PhaseTime]
    data_parts_s: dict[str, float]
    """Mean seconds per step of the parts of `data` that were bracketed."""
    excluded_s: dict[str, float]
    """Seconds in all, evaluation and checkpoints."""
    mfu: Utilisation
    hfu: Utilisation
    efficiency: TrainingEfficiency
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Totals:
    """Running sums over steps: constant memory, however long the run."""

    num_steps: int = 0
    untimed: int = 0
    first_step: int | None = None
    last_step: int | None = None
    step_ns: int = 0
    samples: int | None = 0
    tokens: int | None = 0
    padded_tokens: int | None = 0
    model_flops: int | None = 0
    hardware_flops: int | None = 0
    phases_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    phase_reasons: dict[str, str] = field(default_factory=dict)
    data_parts_ns: dict[str, int] = field(default_factory=dict)
    excluded_ns: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    squared_lengths: int | None = 0

    def add(self, step: StepRecord) -> None:
        """Add a step that counts; warm-up steps are for the caller to leave out."""
        for name, value in step.excluded_ns.items():
            self.excluded_ns[name] = self.excluded_ns.get(name, 0) + value
        for note in step.notes:
            if note in self.notes or len(self.notes) < MAX_NOTES:
                self.notes[note] = self.notes.get(note, 0) + 1
        if step.step_ns is None:
            self.untimed += 1
            return
        self.num_steps += 1
        self.first_step = step.step if self.first_step is None else self.first_step
        self.last_step = step.step
        self.step_ns += step.step_ns
        self.samples = plus(self.samples, step.samples)
        self.tokens = plus(self.tokens, step.tokens)
        self.padded_tokens = plus(self.padded_tokens, step.padded_tokens)
        self.model_flops = plus(self.model_flops, step.model_flops)
        self.hardware_flops = plus(self.hardware_flops, step.hardware_flops)
        self.squared_lengths = plus(self.squared_lengths, step.squared_lengths)
        for name in PHASES:
            phase_ns = step.phases_ns.get(name)
            if phase_ns is None:
                self.phase_reasons.setdefault(name, step.reasons.get(name) or NO_SPAN.get(name, NO_QUEUE))
            else:
                self.phases_ns[name] += phase_ns
        for name, value in step.data_parts_ns.items():
            self.data_parts_ns[name] = self.data_parts_ns.get(name, 0) + value

    def merge(self, later: Totals) -> None:
        """Add the steps of `later`, which came after these."""
        self.num_steps += later.num_steps
        self.untimed += later.untimed
        self.first_step = later.first_step if self.first_step is None else self.first_step
        self.last_step = self.last_step if later.last_step is None else later.last_step
        self.step_ns += later.step_ns
        for name in ("samples", "tokens", "padded_tokens", "model_flops", "hardware_flops", "squared_lengths"):
            setattr(self, name, plus(getattr(self, name), getattr(later, name)))
        for name in ("phases_ns", "data_parts_ns", "excluded_ns", "notes"):
            mine = getattr(self, name)
            for key, value in getattr(later, name).items():
                if name != "notes" or key in mine or len(mine) < MAX_NOTES:
                    mine[key] = mine.get(key, 0) + value
        for name, reason in later.phase_reasons.items():
            self.phase_reasons.setdefault(name, reason)

    def phase_ns(self, name: str) -> int | None:
        """Sum of a phase; None when any step lacked it."""
        return None if name in self.phase_reasons or not self.num_steps else self.phases_ns[name]


def summarise(totals: Totals, facts: RunFacts) -> Summary:
    """The figures of the steps in `totals`, of one rank of the job that `facts` describe."""
    seconds = totals.step_ns / 1e9
    steps = totals.num_steps
    rate = rates(
        num_steps=steps,
        seconds=seconds,
        samples=totals.samples,
        tokens=totals.tokens,
        padded_tokens=totals.padded_tokens,
        data_parallel_size=facts.data_parallel_size,
        num_devices=facts.world_size,
    )
    phases = {}
    for name in PHASES:
        value = totals.phase_ns(name)
        phases[name] = PhaseTime(
            mean_s=None if value is None else value / 1e9 / steps,
            share=None if value is None or not totals.step_ns else value / totals.step_ns,
            reason=totals.phase_reasons.get(name) or (None if steps else "no steps"),
        )
    notes = tuple(f"{note} ({count} steps)" for note, count in totals.notes.items())
    if totals.untimed:
        notes += (f"{totals.untimed} steps have no time and are left out",)
    return Summary(
        first_step=totals.first_step,
        last_step=totals.last_step,
        num_steps=steps,
        mean_step_s=seconds / steps if steps else None,
        throughput=rate,
        phases=phases,
        data_parts_s={name: value / 1e9 / steps for name, value in totals.data_parts_ns.items()} if steps else {},
        excluded_s={name: value / 1e9 for name, value in totals.excluded_ns.items()},
        mfu=used(totals.model_flops, seconds, facts),
        hfu=used(totals.hardware_flops, seconds, facts),
        efficiency=training_efficiency(
            totals.step_ns or None, {name: totals.phase_ns(name) for name in PHASES}, num_devices=facts.world_size
        ),
        notes=notes,
    )


def used(flops: int | None, seconds: float, facts: RunFacts) -> Utilisation:
    """Utilisation from one rank's operations, which every data-parallel rank does once."""
    if flops is None:
        reason = (
            "operations were not counted: give headrace.torch.measure.start(shape=...) the model's shape, and "
            "run.count(tokens=...) the tokens"
        )
        return Utilisation(value=None, impossible=None, flops_per_s_per_device=None, reason=reason)
    return utilisation(
        flops * facts.data_parallel_size,
        step_seconds=seconds,
        num_devices=facts.world_size,
        peak_flops_per_device=facts.peak_flops,
    )


def plus(total: int | None, value: int | None) -> int | None:
    """A sum is only known while every part is."""
    return None if total is None or value is None else total + value
