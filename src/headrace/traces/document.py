"""The analysis as a JSON document, version 1: what `--json` writes and what every report is made from.

Times are microseconds, bandwidths GB/s (1e9 bytes), `null` means that the traces do not say. New keys may come without
a new version; VERSION changes when a key changes its meaning or goes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from headrace.traces.analysis import Analysis
from headrace.traces.bandwidth import CollectiveSpeed
from headrace.traces.breakdown import waterfall
from headrace.traces.named_rules import NamedRule
from headrace.traces.slow_rank import SlowRank
from headrace.traces.timeline import RankTrace, StepLanes
from headrace.traces.training_log import TrainingLog

VERSION = 1

Json: TypeAlias = dict[str, Any]


def to_document(analysis: Analysis) -> Json:
    """Plain dictionaries, lists, numbers and strings."""
    traces = analysis.traces
    return {
        "format": "headrace-analysis",
        "version": VERSION,
        "ranks": [trace.rank for trace in traces if trace.rank is not None],
        "world_size": analysis.world_size,
        "steps": _steps(traces),
        "slow_rank": _slow_rank(analysis.slow_rank),
        "slow_link": _slow_link(analysis),
        "named_rules": [_named_rule(rule) for rule in analysis.named_rules],
        "breakdown": [{"rank": trace.rank, **_lanes(lanes)} for trace in traces for lanes in trace.lanes],
        "totals": [
            {"rank": trace.rank, "window": name, **_lanes(lanes)} for trace in traces for name, lanes in trace.windows
        ],
        "published": [{"rank": trace.rank, **_lanes(lanes)} for trace in traces for lanes in trace.published],
        "waterfall": _waterfall(traces),
        "launch_delay": [_launch_delay(trace) for trace in traces if trace.launch_delay is not None],
        "waits": _waits(analysis),
        "collectives": _collectives(analysis),
        "clock_offsets": [
            {
                "rank": offset.rank,
                "reference": offset.reference,
                "offset_us": _us(offset.offset_ns),
                "spread_us": _us(offset.spread_ns),
                "num_collectives": offset.num_collectives,
            }
            for offset in analysis.offsets
        ],
        "training_log": _training_log(analysis.log) if analysis.log is not None else None,
        "skipped_events": sum(trace.skipped_events for trace in traces),
        "unmatched_collectives": sum(count for group in analysis.groups for _, count in group.unmatched)
        + sum(entry.count for entry in analysis.ungrouped),
        "inputs": [_input(trace) for trace in traces],
        "notes": list(analysis.notes),
    }


def _steps(traces: tuple[RankTrace, ...]) -> list[int]:
    """Every step that anything was recorded of."""
    known: set[int | None] = set()
    for trace in traces:
        known |= {lanes.step for lanes in trace.lanes}
        known |= {collective.step for collective in trace.collectives} | {load.step for load in trace.links}
    return sorted(step for step in known if step is not None)


def _lanes(lanes: StepLanes) -> Json:
    return {
        "step": lanes.step,
        "computing_us": _us(lanes.computing_ns),
        "communication_us": _us(lanes.communication_ns),
        "communication_not_overlapped_us": _us(lanes.not_overlapped_ns),
        "overlapped_us": _us(lanes.overlapped_ns),
        "free_us": _us(lanes.free_ns),
        "e2e_us": _us(lanes.e2e_ns),
        "overlap_percent": _overlap_percent(lanes),
        "matrix_us": _us(lanes.matrix_ns),
        "bubble_us": _us(lanes.bubble_ns),
        "preparing_us": _us(lanes.preparing_ns),
        "copies_us": _us(lanes.copies_ns),
        "idle_us": _us(lanes.idle_ns),
        "free": {
            "exposed_copies_us": _us(lanes.exposed_copies_ns),
            "data_us": _us(lanes.data_ns),
            "host_launch_us": _us(lanes.host_launch_ns),
            "kernel_wait_us": _us(lanes.kernel_wait_ns),
            "unknown_us": _us(lanes.unknown_ns),
        },
    }


def _overlap_percent(lanes: StepLanes) -> float | None:
    if not lanes.communication_ns or lanes.overlapped_ns is None:
        return None
    return round(100 * lanes.overlapped_ns / lanes.communication_ns, 4)


def _waterfall(traces: tuple[RankTrace, ...]) -> list[Json]:
    rows = []
    for trace in traces:
        for lanes in trace.lanes:
            parts = waterfall(lanes)
            if parts is not None:
                named = {f"{name}_us": _us(part) for name, part in parts.items()}
                rows.append({"rank": trace.rank, "step": lanes.step, **named, "e2e_us": _us(lanes.e2e_ns)})
    return rows


def _launch_delay(trace: RankTrace) -> Json:
    delay = trace.launch_delay
    assert delay is not None
    return {
        "rank": trace.rank,
        "num_launches": delay.num_launches,
        "p50_us": round(delay.p50_us, 3),
        "p90_us": round(delay.p90_us, 3),
        "p99_us": round(delay.p99_us, 3),
        "max_us": round(delay.max_us, 3),
    }


def _waits(analysis: Analysis) -> list[Json]:
    """`wait_us` and `waited_for` by the best evidence; `by_duration_us` from paired durations beside it."""
    durations = {own.rank: own.wait_ns for own in analysis.waits_by_duration.of_rank}
    return [
        {
            "rank": own.rank,
            "wait_us": _us(own.wait_ns),
            "waited_for": {str(peer): _us(wait_ns) for peer, wait_ns in sorted(own.waited_for.items())},
            "by_step_us": {str(step): _us(wait_ns) for step, wait_ns in own.by_step.items()},
            "by_duration_us": _us(durations.get(own.rank)),
        }
        for own in analysis.waits
    ]


def _slow_rank(verdict: SlowRank) -> Json:
    return {
        "verdict": verdict.verdict,
        "rank": verdict.rank,
        "traced": verdict.traced,
        "what": verdict.what,
        "sure": verdict.sure,
        "lateness_us_per_step": _us(verdict.lateness_ns),
        "share_of_step": None if verdict.share_of_step is None else round(verdict.share_of_step, 4),
        "steps_late": verdict.steps_late,
        "num_steps": verdict.num_steps,
        "also_late": list(verdict.also_late),
        "disproved_by": verdict.disproved_by,
        "evidence": verdict.evidence,
    }


def _slow_link(analysis: Analysis) -> Json:
    verdict = analysis.slow_link
    return {
        "verdict": verdict.verdict,
        "what": verdict.what,
        "disproved_by": verdict.disproved_by,
        "links": [
            {
                "src": link.src,
                "dst": link.dst,
                "transport": link.transport,
                "bandwidth_gb_s": round(link.bandwidth_gb_s, 4),
                "expected_gb_s": None if link.expected_gb_s is None else round(link.expected_gb_s, 4),
                "slow": link.slow,
                "judged": link.judged,
                "size_mb": round(link.num_bytes / 1e6, 6),
                "ranks_are_local": link.ranks_are_local,
            }
            for link in verdict.links
        ],
    }


def _named_rule(rule: NamedRule) -> Json:
    return {
        "name": rule.name,
        "valid": rule.valid,
        "why_not": rule.why_not,
        "accuses": rule.accuses,
        "value": None if rule.value is None else round(rule.value, 4),
        "unit": rule.unit,
        "threshold": rule.threshold,
        "detail": rule.detail,
    }


def _collectives(analysis: Analysis) -> Json:
    return {
        "groups": [
            {
                "name": paired.group.name,
                "ranks": list(paired.group.ranks),
                "traced": list(paired.traced),
                "paired_by": paired.method,
                "paired": len(paired.instances),
                "unmatched": {str(rank): count for rank, count in paired.unmatched},
            }
            for paired in analysis.groups
        ],
        "cannot_pair": [{"rank": own.rank, "count": own.count, "why": own.why} for own in analysis.ungrouped],
        "kinds": [
            {
                "group": kind.group.name,
                "ranks": list(kind.group.ranks),
                "kind": kind.kind,
                "count": kind.count,
                "total_us": _us(kind.total_ns),
                "waited_us": _us(kind.waited_ns),
                "median_busbw_gb_s": _rounded(kind.median_busbw_gb_s),
            }
            for kind in analysis.kinds
        ],
        "slowest": [_speed(speed) for speed in analysis.slowest],
    }


def _speed(speed: CollectiveSpeed) -> Json:
    instance = speed.instance
    return {
        "kind": instance.kind,
        "group": instance.group.name,
        "step": instance.step,
        "num_bytes": speed.num_bytes,
        "transfer_us": _us(speed.transfer_ns),
        "longest_us": _us(speed.longest_ns),
        "waited_us": _us(speed.waited_ns),
        "algbw_gb_s": _rounded(speed.algbw_gb_s),
        "busbw_gb_s": _rounded(speed.busbw_gb_s),
        "duration_us": {str(rank): _us(part.duration_ns) for rank, part in instance.members},
    }


def _training_log(log: TrainingLog) -> Json:
    return {
        "source": log.source,
        "num_steps": log.num_steps,
        "warm_up_steps": log.warm_up_steps,
        "step_time_median_s": log.step_time_median_s,
        "step_time_s": list(log.step_time_s),
        "published_tflops_per_device": log.published_tflops_per_device,
        "num_devices": log.num_devices,
        "peak_memory_mb": list(log.peak_memory_mb),
        "global_batch_size": log.global_batch_size,
    }


def _input(trace: RankTrace) -> Json:
    return {
        "rank": trace.rank,
        "source": trace.source,
        "format": trace.format,
        "device": trace.device,
        "host": trace.host,
        "chip": trace.chip,
        "stage": trace.stage,
        "num_events": trace.num_events,
        "skipped_events": trace.skipped_events,
        "notes": list(trace.notes),
    }


def _us(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else round(nanoseconds / 1000, 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
