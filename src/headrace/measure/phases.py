"""What a step is made of, and the one rule that turns measured times into phases that sum to the step.

    step = data + forward + backward + optimizer + post + communication + scheduling + other

`data` is what the loop waited for its batch: storage, work on the CPU, copy to the device, hand-out to the ranks.
`communication` is the exposed part only, `scheduling` device idle that communication does not explain, `other` what is
left. A phase that could not be seen is None and has a reason; its time is then inside `other`, never lost, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, TypeAlias

PHASES = ("data", "forward", "backward", "optimizer", "post", "communication", "scheduling", "other")
DATA_PARTS = ("data/storage", "data/cpu", "data/copy", "data/handout")
EXCLUDED = ("evaluation", "checkpoint")
"""Time that is not part of any step: measured, kept, and taken out of step time and throughput."""

SLOTS = ("other", "data", *DATA_PARTS, "forward", "backward", "optimizer", "post", "communication", *EXCLUDED)
"""Where a moment of the loop can be booked. Slot 0 is time outside every span."""
SLOT = {name: slot for slot, name in enumerate(SLOTS)}
DATA_PART_SLOTS = tuple(SLOT[name] for name in DATA_PARTS)
EXCLUDED_SLOTS = tuple(SLOT[name] for name in EXCLUDED)
COMPUTING = ("forward", "backward", "optimizer", "post")
PHASE_SLOTS = (
    ("data", (SLOT["data"], *DATA_PART_SLOTS)),
    *((name, (SLOT[name],)) for name in (*COMPUTING, "communication")),
)
"""The phases that spans are booked on, and where."""

NO_SPAN = {
    name: f"no span of this phase in this step: {how}"
    for name, how in {
        "data": "iterate over run.batches(loader)",
        "forward": "give start() the model, or use run.step.forward",
        "backward": "give start() the model, or use run.step.backward",
        "optimizer": "give start() the optimizer, or use run.step.optimizer",
        "post": "bracket what follows the update with run.step.post",
        "communication": "start(communication=True) wraps the collectives",
    }.items()
}
"""Why a phase of which nothing is known is None, and what would make it known."""
NO_QUEUE = "the host computes itself: there is no device queue that could run dry"

Timeline: TypeAlias = Literal["host", "device"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """One step as it was measured. Times are integer nanoseconds on `timeline`.

    `step_ns` is None when the clock did not move forward. The phases that are not None sum to `step_ns` exactly.
    """

    index: int
    timeline: Timeline
    step_ns: int | None
    phases_ns: dict[str, int | None]
    """Every name of PHASES."""
    data_parts_ns: dict[str, int]
    """Those of DATA_PARTS that were bracketed; part of phases_ns["data"]."""
    host_ns: dict[str, int]
    """Where the host's own time went while a device did the work; empty on the host's own timeline."""
    excluded_ns: dict[str, int]
    reasons: dict[str, str]
    """Why a phase is None."""
    notes: tuple[str, ...] = ()
    """What happened that should not: spans from other threads, crossed spans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What could be seen in a step, beside the times themselves.

    `observed` phases were watched, so that no span means none happened (0); `unseen` holds standing reasons why a phase
    cannot be seen here; `spoiled` phases were measured wrongly in this step.
    """

    observed: Set[str] = frozenset()
    unseen: Mapping[str, str]
    spoiled: Mapping[str, str]


def divide(
    index: int,
    totals_ns: Sequence[int],
    counts: Sequence[int],
    *,
    timeline: Timeline,
    sight: Sight,
    scheduling_ns: int | None,
    host_totals_ns: Sequence[int],
    notes: tuple[str, ...] = (),
) -> StepTimes:
    """Turn booked time (int [len(SLOTS)] ns, one entry per slot) and numbers of spans into the phases of one step.

    `totals_ns` is booked on `timeline`, `host_totals_ns` always on the host's clock.
    """
    excluded_ns = {SLOTS[slot]: totals_ns[slot] for slot in EXCLUDED_SLOTS if counts[slot]}
    step_ns = sum(totals_ns) - sum(excluded_ns.values())
    host_ns = {}
    if timeline == "device":
        host_ns = {name: spent for name, spent, count in zip(SLOTS, host_totals_ns, counts, strict=True) if count}
        host_ns["other"] = host_totals_ns[0]
    if step_ns <= 0 or min(totals_ns) < 0:
        return nothing(index, timeline, f"the {timeline} clock did not move forward", host_ns, excluded_ns, notes)
    phases: dict[str, int | None] = dict.fromkeys(PHASES)
    reasons: dict[str, str] = {}
    left = step_ns
    for name, slots in PHASE_SLOTS:
        booked = spans = 0
        for slot in slots:
            booked += totals_ns[slot]
            spans += counts[slot]
        reason = sight.spoiled.get(name) or sight.unseen.get(name)
        if reason is None and not spans and name not in sight.observed:
            reason = NO_SPAN[name]
        if reason is None:
            phases[name] = booked
            left -= booked
        else:
            reasons[name] = reason
    if scheduling_ns is None:
        reasons["scheduling"] = sight.unseen.get("scheduling", NO_QUEUE)
    else:
        phases["scheduling"] = scheduling_ns
        left -= scheduling_ns
    phases["other"] = left
    return StepTimes(
        index=index,
        timeline=timeline,
        step_ns=step_ns,
        phases_ns=phases,
        data_parts_ns={SLOTS[slot]: totals_ns[slot] for slot in DATA_PART_SLOTS if counts[slot]},
        host_ns=host_ns,
        excluded_ns=excluded_ns,
        reasons=reasons,
        notes=notes,
    )


def nothing(
    index: int,
    timeline: Timeline,
    reason: str,
    host_ns: dict[str, int],
    excluded_ns: dict[str, int],
    notes: tuple[str, ...],
) -> StepTimes:
    """A step of which no time can be given at all, and why."""
    return StepTimes(
        index=index,
        timeline=timeline,
        step_ns=None,
        phases_ns=dict.fromkeys(PHASES),
        data_parts_ns={},
        host_ns=host_ns,
        excluded_ns=excluded_ns,
        reasons=dict.fromkeys(PHASES, reason),
        notes=notes,
    )
