"""Two ratios the performance guide names without a formula. These are our definitions, and reports say so.

    bandwidth ratio     = achieved / nominal bandwidth of one transport
    training efficiency = computing / end-to-end time of a step

Achieved bandwidth is bytes over the time of the transfer itself. The duration of one rank's collective kernel contains
its wait for the others: use the shortest duration over the ranks, or the transfer time a trace gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.errors import ConfigError
from headrace.measure.phases import COMPUTING
from headrace.measure.sense import above_zero, zero_or_more

OWN_DEFINITION = "our definition: the guide names it without a formula"

Chip: TypeAlias = Literal["910A", "910B"]
Collective: TypeAlias = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "send_recv"
]

NOMINAL_GB_PER_S: dict[Chip, dict[str, float]] = {
    # Ascend msprof, analysis/msparser/cluster: the standard bandwidths its own judgement uses.
    "910A": {"RDMA": 12.5, "HCCS": 18.0, "PCIE": 20.0},
    "910B": {"RDMA": 25.0, "HCCS": 28.0},
}
"""GB/s (10^9 bytes) per link."""

EXPECTED_SHARE = 0.8
"""Share of the nominal figure that a healthy link reaches with large packets, by the same source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Bytes moved over one transport and the seconds it took. MB of a trace are 10^6 bytes."""

    transport: str
    nbytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BandwidthRatio:
    """Achieved over nominal for one transport. None with a reason where either is unknown."""

    transport: str
    achieved_gb_per_s: float | None
    nominal_gb_per_s: float | None
    ratio: float | None
    reason: str | None = None
    definition: str = OWN_DEFINITION


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingEfficiency:
    """Computing over end to end, 0..1."""

    value: float | None
    reason: str | None = None
    definition: str = OWN_DEFINITION


def bus_bandwidth(collective: Collective, nbytes: float, num_ranks: int, seconds: float) -> float | None:
    """Bytes/s per link that a collective of `nbytes` over `num_ranks` reached: comparable with a link's nominal figure.

    `nbytes` is the whole buffer: for all_gather what a rank receives, for reduce_scatter what a rank gives, for
    all_to_all one rank's buffer. Factors of nccl-tests, doc/PERFORMANCE.md. None for a time not above zero, a size that
    cannot be, and for one rank, which moves nothing. Raises ConfigError for a collective without a factor.
    """
    if num_ranks < 2 or not above_zero(seconds) or not zero_or_more(nbytes):
        return None
    share = (num_ranks - 1) / num_ranks
    factors = {
        "all_reduce": 2 * share,
        "reduce_scatter": share,
        "all_gather": share,
        "all_to_all": share,
        "broadcast": 1.0,
        "reduce": 1.0,
        "send_recv": 1.0,
    }
    if collective not in factors:
        raise ConfigError(f"no bus factor for {collective!r}; known: {', '.join(factors)}")
    return nbytes / seconds * factors[collective]


def bandwidth_ratios(transfers: Iterable[Transfer], nominal_gb_per_s: Mapping[str, float]) -> dict[str, BandwidthRatio]:
    """One ratio per transport: sum of bytes over sum of seconds, against the nominal figure of that transport."""
    nbytes: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for transfer in transfers:
        nbytes[transfer.transport] = nbytes.get(transfer.transport, 0.0) + transfer.nbytes
        seconds[transfer.transport] = seconds.get(transfer.transport, 0.0) + transfer.seconds
    return {name: ratio_of(name, nbytes[name], seconds[name], nominal_gb_per_s.get(name)) for name in sorted(nbytes)}


def ratio_of(transport: str, nbytes: float, seconds: float, nominal: float | None) -> BandwidthRatio:
    """The ratio of one transport, or why there is none."""
    achieved = nbytes / seconds / 1e9 if above_zero(seconds) and zero_or_more(nbytes) else None
    reason = None
    if achieved is None:
        reason = f"{nbytes} bytes in {seconds} s is not a measurement"
    elif nominal is None or not above_zero(nominal):
        reason = f"the nominal bandwidth of {transport} is not known: pass it"
    return BandwidthRatio(
        transport=transport,
        achieved_gb_per_s=achieved,
        nominal_gb_per_s=nominal,
        ratio=achieved / nominal if achieved is not None and nominal is not None and reason is None else None,
        reason=reason,
    )


def training_efficiency(
    step_ns: int | None, phases_ns: Mapping[str, int | None], *, num_devices: int
) -> TrainingEfficiency:
    """(forward + backward + optimizer + post) / step from a step's phases. What was not seen is not guessed.

    With several devices communication must have been seen: otherwise it hides inside the computing phases. `post` may
    be None, most loops have none.
    """
    if step_ns is None or step_ns <= 0:
        return TrainingEfficiency(value=None, reason="the step has no time")
    needed = ["forward", "backward", "optimizer"] + (["communication"] if num_devices > 1 else [])
    unseen = [name for name in needed if phases_ns.get(name) is None]
    if unseen:
        return TrainingEfficiency(value=None, reason=f"not seen: {', '.join(unseen)}")
    return TrainingEfficiency(value=sum(phases_ns.get(name) or 0 for name in COMPUTING) / step_ns)


def training_efficiency_of_trace(computing: float, end_to_end: float) -> TrainingEfficiency:
    """The same from a trace's columns Computing and E2E = Computing + Communication(Not Overlapped) + Free."""
    if not above_zero(end_to_end) or not zero_or_more(computing):
        return TrainingEfficiency(value=None, reason=f"{computing} of {end_to_end} is not a measurement")
    return TrainingEfficiency(value=computing / end_to_end)
