"""How much of a larger machine arrives: the third number to look at.

    linearity = throughput of the large run / (throughput of the small run x how many times larger)

from one card to a node, from one card to a cluster, from one node to a cluster; throughput in tokens/s (samples/s where
there are no tokens). With the same batch per data-parallel rank (weak scaling) this equals step time small / large.
Below 0.8 communication is suspected, but only after data loading and the host have been excluded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.errors import ConfigError
from headrace.measure.sense import above_zero

SUSPICIOUS_BELOW = 0.8
HOST_SHARE_LIMIT = 0.05
"""Waiting for data and for the host above this share of the step has to be mended before a network is suspected."""

Finding: TypeAlias = Literal["good", "communication", "data or host first", "cannot tell"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """One run as the comparison needs it: what ran, how large, how fast. None: not recorded."""

    num_devices: int
    num_nodes: int | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    step_seconds: float | None = None
    samples_per_data_rank: float | None = None
    """Samples per data-parallel rank and optimizer step."""
    data_parallel_size: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    context_parallel_size: int | None = None
    sequence_length: int | None = None
    real_token_share: float | None = None
    recompute: str | None = None
    dtype: str | None = None
    device_name: str | None = None
    model: str | None = None
    """Any text that is the same for the same model, such as a hash of its configuration."""
    data_share: float | None = None
    """Exposed data time / step time."""
    host_share: float | None = None
    """Time lost to the host / step time: scheduling on a device, time outside every phase where the host computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Linearity:
    """`value` is not clamped: above 1 happens (caches, smaller optimizer shards, noise) and is flagged."""

    value: float | None
    kind: str
    """ "card -> node", "card -> cluster", "node -> cluster", or the numbers of devices."""
    units: float
    """How many times larger the large run is."""
    by: Literal["tokens_per_s", "samples_per_s", "nothing"]
    superlinear: bool | None
    below_limit: bool | None
    finding: Finding
    differences: tuple[str, ...]
    """What is not the same in both runs although it should be; the value then compares more than the size."""
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StrongScaling:
    """The same global batch on more devices: another question than linearity, hence another name."""

    speedup: float | None
    efficiency: float | None
    reason: str | None = None


def linearity(baseline: float, scaled: float, units: float) -> float | None:
    """scaled / (baseline x units); None where a throughput is not above zero or units is not."""
    if not (above_zero(baseline) and above_zero(scaled) and above_zero(units)):
        return None
    return scaled / (baseline * units)


def weak_scaling(baseline_step_seconds: float, scaled_step_seconds: float) -> float | None:
    """The shortcut by step times; only valid with the same batch per data-parallel rank in both runs."""
    return linearity(scaled_step_seconds, baseline_step_seconds, 1.0)


def strong_scaling(baseline_step_seconds: float, scaled_step_seconds: float, units: float) -> StrongScaling:
    """speedup = t_1 / t_n and efficiency = speedup / n for one global batch on n times as many devices."""
    speedup = weak_scaling(baseline_step_seconds, scaled_step_seconds)
    if speedup is None or not above_zero(units):
        return StrongScaling(speedup=None, efficiency=None, reason="step times and the number of units must be above 0")
    return StrongScaling(speedup=speedup, efficiency=speedup / units)


def compare_scaling(small: ScalingPoint, large: ScalingPoint) -> Linearity:
    """Linearity of two recorded runs, with everything that makes the number mean something else.

    Raises ConfigError when `large` is not larger: exchange them.
    """
    if large.num_devices <= small.num_devices:
        raise ConfigError(
            f"linearity needs a larger second run, got {small.num_devices} and then {large.num_devices} devices"
        )
    units = large.num_devices / small.num_devices
    by: Literal["tokens_per_s", "samples_per_s", "nothing"] = "nothing"
    value = None
    if small.tokens_per_s is not None and large.tokens_per_s is not None:
        by, value = "tokens_per_s", linearity(small.tokens_per_s, large.tokens_per_s, units)
    elif small.samples_per_s is not None and large.samples_per_s is not None:
        by, value = "samples_per_s", linearity(small.samples_per_s, large.samples_per_s, units)
    reason = None
    if value is None:
        reason = "a throughput is zero or less" if by != "nothing" else "the runs have no throughput in common"
    differences = what_differs(small, large)
    below = None if value is None else value < SUSPICIOUS_BELOW
    return Linearity(
        value=value,
        kind=kind_of(small, large),
        units=units,
        by=by,
        superlinear=None if value is None else value > 1.0,
        below_limit=below,
        finding=judge(below, large, differences),
        differences=differences,
        reason=reason,
    )


def judge(below_limit: bool | None, large: ScalingPoint, differences: tuple[str, ...]) -> Finding:
    """Below the limit the network is only named when the runs are comparable and the host is known to keep up."""
    if below_limit is None or differences:
        return "cannot tell"
    if not below_limit:
        return "good"
    if large.data_share is None or large.host_share is None:
        return "cannot tell"
    return "data or host first" if large.data_share + large.host_share > HOST_SHARE_LIMIT else "communication"


MUST_MATCH = {
    "samples_per_data_rank": "samples per data-parallel rank and step",
    "sequence_length": "sequence length",
    "tensor_parallel_size": "tensor parallel size",
    "pipeline_parallel_size": "pipeline parallel size",
    "context_parallel_size": "context parallel size",
    "recompute": "recompute",
    "dtype": "dtype",
    "device_name": "device",
    "model": "model",
}
REAL_TOKEN_SHARE_TOLERANCE = 0.02


def what_differs(small: ScalingPoint, large: ScalingPoint) -> tuple[str, ...]:
    """One sentence for each property that should be equal and is not, or is known of one run only."""
    found = []
    for name, words in MUST_MATCH.items():
        one, other = getattr(small, name), getattr(large, name)
        if one != other:
            found.append(f"{words}: {said(one)} and {said(other)}")
    shares = (small.real_token_share, large.real_token_share)
    if shares[0] is not None and shares[1] is not None and abs(shares[0] - shares[1]) > REAL_TOKEN_SHARE_TOLERANCE:
        found.append(f"share of real tokens: {shares[0]:.3f} and {shares[1]:.3f}")
    return tuple(found)


def said(value: object) -> str:
    """A value for a sentence."""
    return "not recorded" if value is None else str(value)


def kind_of(small: ScalingPoint, large: ScalingPoint) -> str:
    """Which of the named comparisons this is, by the numbers of devices and nodes."""
    devices = f"{small.num_devices} -> {large.num_devices} devices"
    if small.num_nodes is None or large.num_nodes is None:
        return devices
    if small.num_devices == 1:
        return "card -> node" if large.num_nodes == 1 else "card -> cluster"
    if small.num_nodes == 1 and large.num_nodes > 1:
        per_node = large.num_devices / large.num_nodes
        return "node -> cluster" if small.num_devices == per_node else devices
    return devices
