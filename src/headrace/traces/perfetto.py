"""All ranks on one time axis, as a Chrome trace for ui.perfetto.dev: steps, lanes, and collectives with their waits.

The only place where clocks are compared: each rank is shifted by its estimated offset (clocks.py).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ConfigError
from headrace.traces.analysis import Analysis
from headrace.traces.timeline import RankTrace
from headrace.traces.waits import waits_in

_LANES = ("Step", "Computing", "Communication", "Copies")
_COLLECTIVES = len(_LANES)
"""Thread of the collectives; lanes have the threads before it."""


def write_perfetto(path: Path, analysis: Analysis) -> int:
    """Write the events; gzip when the name ends in .gz. Returns their number. Raises ConfigError when it cannot be
    written. The analysis must have been made with `keep_spans`."""
    events = list(_events(analysis))
    data = msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})
    try:
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    return len(events)


def _events(analysis: Analysis) -> Iterator[dict[str, Any]]:
    offsets = {offset.rank: offset.offset_ns for offset in analysis.offsets}
    starts = [moment - _offset(trace, offsets) for trace in analysis.traces for moment in _moments(trace)]
    origin_ns = min(starts, default=0)
    waits = _waits(analysis)
    for place, trace in enumerate(analysis.traces):
        pid = place if trace.rank is None else trace.rank
        shift_ns = origin_ns + _offset(trace, offsets)
        yield _name("process_name", pid, 0, f"rank {trace.rank}" if trace.rank is not None else Path(trace.source).name)
        for thread, name in enumerate((*_LANES, "collectives")):
            yield _name("thread_name", pid, thread, name)
        for name, intervals in trace.spans:
            for start_ns, end_ns in intervals.tolist():
                yield _slice(name, pid, _LANES.index(name), start_ns - shift_ns, end_ns - start_ns, {})
        for number, collective in enumerate(trace.collectives):
            args: dict[str, Any] = {"step": collective.step, "bytes": collective.num_bytes}
            if (wait_ns := waits.get((trace.rank, number))) is not None:
                args["wait_us"] = wait_ns / 1000
            start_ns = collective.start_ns - shift_ns
            yield _slice(collective.kind, pid, _COLLECTIVES, start_ns, collective.duration_ns, args)


def _waits(analysis: Analysis) -> dict[tuple[int | None, int], int]:
    """(rank, place of the collective in its trace) -> wait; only paired ones have one."""
    by_part = {
        (rank, id(part)): waits_in(instance)[rank]
        for group in analysis.groups
        for instance in group.instances
        for rank, part in instance.members
    }
    return {
        (trace.rank, number): by_part[trace.rank, id(part)]
        for trace in analysis.traces
        if trace.rank is not None
        for number, part in enumerate(trace.collectives)
        if (trace.rank, id(part)) in by_part
    }


def _moments(trace: RankTrace) -> Iterator[int]:
    for _, intervals in trace.spans:
        if len(intervals):
            yield int(intervals[0, 0])
    if trace.collectives:
        yield trace.collectives[0].start_ns


def _offset(trace: RankTrace, offsets: dict[int, int]) -> int:
    return 0 if trace.rank is None else offsets.get(trace.rank, 0)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(name: str, pid: int, tid: int, start_ns: int, duration_ns: int, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1000,
        "dur": duration_ns / 1000,
        "args": args,
    }
