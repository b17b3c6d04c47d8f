"""Training logs: seconds per step and what the framework printed beside them. No rank is told apart, so none is blamed.

Two forms are read: MindSpeed-LLM's baseline JSON ({"time info": ms per step, "throughput": TFLOP/s per device,
"memo info": MB per rank}), and the lines Megatron-LM prints (`elapsed time per iteration (ms): ... | ...`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from headrace.errors import FormatError, HeadraceError
from headrace.traces.json_events import NOT_JSON
from headrace.traces.time_bounds import elapsed_ns

WARM_UP_FACTOR = 1.2
"""Leading steps slower than this times the median of the second half are warm-up: compilation, caches, allocator."""

_ITERATION = re.compile(r"iteration\s+(\d+)\s*/.*?elapsed time per iteration \(ms\):\s*([\d.]+)")
_TFLOPS = re.compile(r"throughput per GPU \(TFLOP/s/GPU\):\s*([\d.]+)")
_BATCH = re.compile(r"global batch size:\s*(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingLog:
    """What a log says. Medians leave the warm-up steps out; None where the log does not say it."""

    source: str
    num_steps: int
    warm_up_steps: int
    step_time_s: tuple[float, ...]
    step_time_median_s: float
    published_tflops_per_device: float | None
    """Median of the framework's own figure."""
    num_devices: int | None
    peak_memory_mb: tuple[float, ...] = ()
    """Per rank, as published (MB of the framework)."""
    global_batch_size: int | None = None

    def tokens_per_s(self, tokens_per_step: int) -> float:
        """All devices together, at the median step time."""
        return tokens_per_step / self.step_time_median_s

    def tflops_per_device(self, flops_per_step: float) -> float | None:
        """From the operations of one optimizer step of the whole job; None when the number of devices is unknown."""
        if not self.num_devices:
            return None
        return flops_per_step / (self.num_devices * self.step_time_median_s) / 1e12


def is_training_log(path: Path) -> bool:
    """Looks at the first 64 KiB."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    return b'"time info"' in head or b"elapsed time per iteration (ms)" in head


def read_training_log(path: Path) -> TrainingLog:
    """Read either form. Raises FormatError."""
    text = path.read_bytes()
    try:
        return _from_text(path, text)
    except HeadraceError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(f"{path} is not what training logs are: {type(error).__name__}: {error}") from error


def _from_text(path: Path, text: bytes) -> TrainingLog:
    try:
        document = msgspec.json.decode(text)
    except NOT_JSON:
        return _from_lines(path, text.decode(errors="replace"))
    if not isinstance(document, dict) or not isinstance(document.get("time info"), list):
        raise FormatError(f"{path} is no training log: it has no list `time info`")
    return _from_document(path, document)


def _from_document(path: Path, document: dict[str, Any]) -> TrainingLog:
    times = [_seconds(ms) for ms in document["time info"]]
    memory = document.get("memo info") or []
    peaks = tuple(float(entry["max allocated memory"]) for entry in memory if "max allocated memory" in entry)
    published = [float(value) for value in document.get("throughput") or []]
    return _log(path, times, published, num_devices=len(peaks) or None, peaks=peaks, batch=None)


def _from_lines(path: Path, text: str) -> TrainingLog:
    lines = [line for line in text.splitlines() if "elapsed time per iteration (ms)" in line]
    times = [_seconds(found.group(2)) for line in lines if (found := _ITERATION.search(line))]
    published = [float(found.group(1)) for line in lines if (found := _TFLOPS.search(line))]
    batch = next((int(found.group(1)) for line in reversed(lines) if (found := _BATCH.search(line))), None)
    return _log(path, times, published, num_devices=None, peaks=(), batch=batch)


def _seconds(milliseconds: Any) -> float:
    elapsed_ns(float(milliseconds) * 1e6)
    return float(milliseconds) / 1000


def _log(
    path: Path,
    times: list[float],
    published: list[float],
    *,
    num_devices: int | None,
    peaks: tuple[float, ...],
    batch: int | None,
) -> TrainingLog:
    if not times:
        raise FormatError(f"{path} is a training log without a single step time")
    settled = median(times[len(times) // 2 :])
    warm_up = 0
    while warm_up < len(times) - 1 and times[warm_up] > WARM_UP_FACTOR * settled:
        warm_up += 1
    own = published[warm_up:] if len(published) == len(times) else published
    return TrainingLog(
        source=str(path),
        num_steps=len(times),
        warm_up_steps=warm_up,
        step_time_s=tuple(times),
        step_time_median_s=median(times[warm_up:]),
        published_tflops_per_device=median(own) if own else None,
        num_devices=num_devices,
        peak_memory_mb=peaks,
        global_batch_size=batch,
    )
