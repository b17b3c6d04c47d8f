"""What people and dashboards see of a window: a line for the terminal, and numbers under names they already plot.

The names that torchtitan logs are kept letter by letter (torchtitan/components/metrics.py), so an existing dashboard
goes on; ours stand beside them under `headrace/`. What was not measured is left out, never logged as 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.measure.memory import GIB, MemoryEstimate, MemoryUse, in_gib
from headrace.measure.phases import PHASES
from headrace.measure.slow_rank import SlowRank
from headrace.measure.summary import Summary
from headrace.wording import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The steps since the last line, as one rank saw them."""

    step: int
    """The last step of the window, counted from 0."""
    summary: Summary
    memory: MemoryUse | None
    slow_rank: SlowRank | None


def metrics(window: Window) -> dict[str, float]:
    """Plain numbers by name, for TensorBoard, W&B, MLflow or anything with log(dict, step)."""
    summary, rate = window.summary, window.summary.throughput
    data = summary.phases["data"]
    found: dict[str, float | None] = {
        "throughput(tps)": rate.tokens_per_s_per_device,
        "tflops": scaled(summary.mfu.flops_per_s_per_device, 1e-12),
        "mfu(%)": scaled(summary.mfu.value, 100.0),
        "time_metrics/end_to_end(s)": summary.mean_step_s,
        "time_metrics/data_loading(s)": data.mean_s,
        "time_metrics/data_loading(%)": scaled(data.share, 100.0),
        "headrace/samples_per_s": rate.samples_per_s,
        "headrace/tokens_per_s": rate.tokens_per_s,
        "headrace/padded_tokens_per_s": rate.padded_tokens_per_s,
        "headrace/padding_ratio": rate.padding_ratio,
        "headrace/hfu(%)": scaled(summary.hfu.value, 100.0),
        "headrace/training_efficiency(%)": scaled(summary.efficiency.value, 100.0),
    }
    found |= {f"headrace/{name}(s)": summary.phases[name].mean_s for name in PHASES}
    found |= {f"headrace/{name}(s)": seconds for name, seconds in summary.data_parts_s.items()}
    found |= memory_metrics(window.memory)
    if window.slow_rank is not None and window.slow_rank.rank is not None:
        found["headrace/slow_rank"] = window.slow_rank.rank
        found["headrace/slow_rank_wait(%)"] = scaled(window.slow_rank.share, 100.0)
    return {name: value for name, value in found.items() if value is not None}


def memory_metrics(memory: MemoryUse | None) -> dict[str, float | None]:
    """Peaks in GiB (2^30 bytes) and in per cent of the device."""
    found: dict[str, float | None] = {}
    if memory is not None and memory.host is not None:
        found["headrace/rss(GiB)"] = memory.host.rss_bytes / GIB
        found["headrace/pss(GiB)"] = scaled(memory.host.pss_bytes, 1 / GIB)
    if memory is None or memory.device is None:
        return found
    device = memory.device
    active = device.peak_allocated_bytes if device.peak_active_bytes is None else device.peak_active_bytes
    per_cent = 100.0 / device.capacity_bytes if device.capacity_bytes else None
    return found | {
        "memory/max_active(GiB)": active / GIB,
        "memory/max_active(%)": None if per_cent is None else active * per_cent,
        "memory/max_reserved(GiB)": device.peak_reserved_bytes / GIB,
        "memory/max_reserved(%)": None if per_cent is None else device.peak_reserved_bytes * per_cent,
        "memory/num_alloc_retries": device.alloc_retries,
        "memory/num_ooms": device.out_of_memory_errors,
        "headrace/max_allocated(GiB)": device.peak_allocated_bytes / GIB,
    }


def terminal_line(window: Window) -> str:
    """One line: step, step time, tokens/s, where the time went, memory, and who is slow. "?" is not measured."""
    summary, rate = window.summary, window.summary.throughput
    parts = [
        f"step {window.step}",
        f"{shown(summary.mean_step_s, 1e3, '.1f')} ms",
        f"{shown(rate.tokens_per_s, 1.0, ',.0f')} tokens/s" if rate.tokens_per_s is not None
        else f"{shown(rate.samples_per_s, 1.0, ',.1f')} samples/s",
        " ".join(f"{name} {shown(summary.phases[name].share, 100.0, '.0f')}%" for name in PHASES),
    ]  # fmt: skip
    if summary.mfu.value is not None:
        parts.append(f"MFU {summary.mfu.value:.1%}" + (" (impossible)" if summary.mfu.impossible else ""))
    if window.memory is not None and window.memory.device is not None:
        device = window.memory.device
        parts.append(f"reserved {device.peak_reserved_bytes / GIB:.2f} GiB")
        if device.alloc_retries:
            parts.append(f"{device.alloc_retries} allocation retries")
    elif window.memory is not None and window.memory.host is not None:
        parts.append(f"rss {window.memory.host.rss_bytes / GIB:.2f} GiB")
    if window.slow_rank is not None and window.slow_rank.rank is not None:
        slow = window.slow_rank
        parts.append(f"rank {slow.rank} is late ({slow.cause}): the others wait {slow.share:.0%} of a step")
    return " | ".join(parts)


@dataclass(slots=True)
class Peaks:
    """The largest memory figures of all windows of a run, in bytes; None: not read."""

    allocated: int | None = None
    reserved: int | None = None
    rss: int | None = None

    def add(self, use: MemoryUse) -> None:
        """Take in one window."""
        if use.device is not None:
            self.allocated = max(self.allocated or 0, use.device.peak_allocated_bytes)
            self.reserved = max(self.reserved or 0, use.device.peak_reserved_bytes)
        if use.host is not None:
            self.rss = max(self.rss or 0, use.host.peak_rss_bytes)


def summary_text(summary: Summary, peaks: Peaks, estimate: MemoryEstimate | None) -> str:
    """The end-of-run summary: several lines, each figure with its unit, each gap with its reason.

    `estimate` is what the published formulas say a device needs, beside what was measured.
    """
    if summary.num_steps == 0:
        return "headrace: no step was measured after the warm-up"
    rate = summary.throughput
    lines = [
        f"headrace: {counted(summary.num_steps, 'step')} ({summary.first_step} to {summary.last_step}), "
        f"mean {shown(summary.mean_step_s, 1e3, '.2f')} ms",
        f"  throughput    {shown(rate.samples_per_s, 1.0, ',.1f')} samples/s, "
        f"{shown(rate.tokens_per_s, 1.0, ',.0f')} tokens/s, "
        f"{shown(rate.tokens_per_s_per_device, 1.0, ',.0f')} per device, "
        + ("padding not given" if rate.padding_ratio is None else f"padding {rate.padding_ratio:.1%}")
        + (f" ({rate.reason})" if rate.reason else ""),
        *phase_lines(summary),
    ]
    for name, used in (("MFU", summary.mfu), ("HFU", summary.hfu)):
        lines.append(f"  {name:<14}" + (f"{used.value:.1%}" if used.value is not None else f"not known: {used.reason}"))
    efficiency = summary.efficiency
    said = f"not known: {efficiency.reason}" if efficiency.value is None else f"{efficiency.value:.1%}"
    lines.append(f"  efficiency    {said} ({efficiency.definition})")
    lines.append(f"  memory        {memory_text(peaks, estimate)}")
    lines += [f"  note: {note}" for note in summary.notes]
    return "\n".join(lines)


def phase_lines(summary: Summary) -> list[str]:
    """One line per phase, part and excluded time."""
    lines = []
    for name in PHASES:
        phase = summary.phases[name]
        if phase.mean_s is None:
            lines.append(f"  {name:<14}not seen: {phase.reason}")
        else:
            lines.append(f"  {name:<14}{phase.mean_s * 1e3:10.3f} ms {shown(phase.share, 100.0, '6.1f')} %")
        if name == "data":
            parts = summary.data_parts_s.items()
            lines += [f"    {part:<14}{seconds * 1e3:8.3f} ms" for part, seconds in parts]
    excluded = summary.excluded_s.items()
    return lines + [f"  {name:<14}{seconds:10.3f} s in all, not part of any step" for name, seconds in excluded]


def memory_text(peaks: Peaks, estimate: MemoryEstimate | None) -> str:
    """Measured peaks, and the formula's figure beside them."""
    said = f"peak resident {in_gib(peaks.rss)}"
    if peaks.reserved is not None:
        said = f"peak allocated {in_gib(peaks.allocated)}, reserved {in_gib(peaks.reserved)}; {said}"
    if estimate is not None:
        said += f"; by formula {in_gib(estimate.total_bytes)} per device (mixed precision, Adam)"
    return said


def shown(value: float | None, factor: float, form: str) -> str:
    """A number for people, or "?"."""
    return "?" if value is None else format(value * factor, form)


def scaled(value: float | None, factor: float) -> float | None:
    """value x factor where it is known."""
    return None if value is None else value * factor
