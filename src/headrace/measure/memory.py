"""How close to the edge a step runs: peaks per window on the device, resident memory of the process, and the estimate.

All figures are bytes; people see GiB (2^30). `allocated` is what tensors needed, `reserved` what the caching allocator
took from the device: the second is what a monitor shows and what an out-of-memory error is about. Retries above zero
mean the allocator already had to throw its cache away: slow long before it fails.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from headrace.errors import ConfigError
from headrace.measure.flops import ModelShape, Recompute, attention_weights, check_recompute
from headrace.measure.sense import whole_at_least

GIB = 2**30
PROC_FILE_BYTES = 16_384
"""More than /proc/self/status holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Peaks on the device since the window began."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_active_bytes: int | None
    """Allocated plus freed but still in use by another stream; None where the allocator does not tell."""
    alloc_retries: int | None
    """Since the process began."""
    out_of_memory_errors: int | None
    capacity_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Memory of this process in RAM."""

    rss_bytes: int
    """Resident now, pages shared with other processes counted in full in each of them."""
    peak_rss_bytes: int
    """Largest since the process began: the kernel keeps no peak per window."""
    pss_bytes: int | None
    """Resident now, shared pages divided among those who share them; the sum over ranks is what the host really holds.
    None where it was not asked for or the kernel does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """One window's figures. `device` is None on a CPU, or when it could not be read: `reason` says which."""

    host: HostMemory | None
    device: DeviceMemory | None
    reason: str | None = None


ReadDeviceMemory: TypeAlias = Callable[[], DeviceMemory]
"""Returns the peaks since its last call and starts a new window."""


class HostMemoryReader:
    """Reads the resident memory of one process (default: this one) again and again.

    Its /proc file stays open: behind a step of the model, with cold caches, finding it costs 150 us and reading 45.
    """

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self.proc = proc
        self.status: int | None = None
        with suppress(OSError):  # a process that is gone, or not Linux's /proc
            self.status = os.open(proc / "status", os.O_RDONLY)

    def read(self, *, proportional: bool = False) -> HostMemory | None:
        """Resident memory; None when the system does not tell or the process is gone.

        `proportional` asks for the PSS as well: the kernel then walks all pages (7 ms with 0.4 GiB resident, in
        proportion more with more), so a loop does not.
        """
        if self.status is None:
            return None
        try:
            status = os.pread(self.status, PROC_FILE_BYTES, 0)
        except OSError:
            return None
        found = kibibytes_in(status, ("VmRSS", "VmHWM"))
        resident, peak = found.get("VmRSS"), found.get("VmHWM")
        if resident is None:
            return None
        if peak is None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        pss = kibibytes(self.proc / "smaps_rollup", ("Pss",)).get("Pss") if proportional else None
        return HostMemory(rss_bytes=resident, peak_rss_bytes=peak, pss_bytes=pss)

    def close(self) -> None:
        """Close the file; further calls do nothing, and there is nothing to read any more."""
        descriptor, self.status = self.status, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def host_memory(proc: Path = Path("/proc/self"), *, proportional: bool = False) -> HostMemory | None:
    """Resident memory of a process, read once; see HostMemoryReader."""
    reader = HostMemoryReader(proc)
    try:
        return reader.read(proportional=proportional)
    finally:
        reader.close()


def kibibytes(path: Path, names: tuple[str, ...]) -> dict[str, int]:
    """`Name:  123 kB` lines of a /proc file as bytes; empty where there is no such file."""
    try:
        return kibibytes_in(path.read_bytes(), names)
    except OSError:
        return {}


def kibibytes_in(text: bytes, names: tuple[str, ...]) -> dict[str, int]:
    """The same in its text. The other lines are not taken apart: 5 us instead of 30."""
    found = {}
    for name in names:
        _, label, rest = text.partition(f"\n{name}:".encode())
        if label:
            found[name] = int(rest.partition(b"kB")[0]) * 1024
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes per device by the published formulas: a plausibility check of the measured peak, not a promise."""

    parameters: float
    """On the fullest device."""
    weights_and_optimizer_bytes: float
    activation_bytes: float

    @property
    def total_bytes(self) -> float:
        """What the allocator should be near to, without its fragmentation."""
        return self.weights_and_optimizer_bytes + self.activation_bytes


def estimate_memory(
    shape: ModelShape,
    *,
    sequence_length: int,
    micro_batch_size: int,
    recompute: Recompute,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    distributed_optimizer: bool = False,
    tied_embeddings: bool = False,
) -> MemoryEstimate:
    """Weights, gradients and Adam in mixed precision, and the activations of the first pipeline stage.

    18 bytes per parameter (bf16 weight 2, fp32 gradient 4, fp32 weight 4, two moments 8), or 6 + 12 / DP with the
    optimizer sharded: Megatron-LM, megatron/training/theoretical_memory_usage.py. Activations with sequence parallelism
    s b h (18 + 4 ffn / h) per layer with selective recompute and 2 s b h with full: arXiv:2205.05198, table 2. Without
    recompute that paper adds 5 a s / h per layer for attention kernels that store the score matrix; fused kernels do
    not, so "none" is estimated like "selective". Raises ConfigError for sizes below one, and for layers with experts
    when the shape does not say how many.
    """
    whole_at_least(
        1,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        data_parallel_size=data_parallel_size,
    )
    check_recompute(recompute)
    if shape.moe_layers and not shape.experts:
        raise ConfigError("the memory of layers with experts needs their number: ModelShape(experts=...)")
    matrices = 3 if shape.gated else 2
    experts_in_layer = matrices * shape.hidden * (shape.moe_ffn * shape.experts + shape.shared_ffn)
    block = shape.layers * attention_weights(shape) + shape.moe_layers * experts_in_layer
    block += (shape.layers - shape.moe_layers) * matrices * shape.hidden * shape.ffn
    embedding = shape.hidden * shape.vocab
    # The first stage holds the embedding; a single stage also holds the output matrix unless the two are one.
    ends = embedding * (2 if pipeline_parallel_size == 1 and not tied_embeddings else 1)
    parameters = (block / pipeline_parallel_size + ends) / tensor_parallel_size
    per_parameter = 6 + 12 / data_parallel_size if distributed_optimizer else 18.0
    tokens = sequence_length * micro_batch_size
    per_layer = 2.0 * tokens * shape.hidden
    if recompute != "full":
        per_layer = tokens * shape.hidden * (18 + 4 * shape.ffn / shape.hidden)
    # The first stage of a pipeline keeps one micro batch in flight per stage, so its layers/stages cancel out.
    activations = per_layer * shape.layers
    if pipeline_parallel_size == 1:
        activations += 4 * tokens * shape.hidden * (1 + shape.vocab / shape.hidden)
    return MemoryEstimate(
        parameters=parameters,
        weights_and_optimizer_bytes=parameters * per_parameter,
        activation_bytes=activations / tensor_parallel_size,
    )


def in_gib(nbytes: float | None) -> str:
    """Bytes for people: "12.34 GiB"."""
    return "not measured" if nbytes is None else f"{nbytes / GIB:.2f} GiB"
