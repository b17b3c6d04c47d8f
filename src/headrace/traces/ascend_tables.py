"""Ascend's published tables: communication.json, communication_matrix.json, step_trace_time.csv, as rows.

The same rows come out of a rank's own files, of `cluster_analysis_output` and of analysis.db; their layouts differ,
what they mean does not (msprof, torch_npu `_trace_step_time_parser.py`):
  communication       times of one operation on one rank in ms, and bytes per transport in MB (1e6 bytes)
  matrix              what went from rank to rank; the class `total` holds everything, the others repeat parts of it
  step_trace_time     microseconds per step
"Total Op Info" repeats the operations and is never counted; SDMA is the sum of HCCS, PCIE and SIO and is not either.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import FormatError
from headrace.traces.json_events import NOT_JSON
from headrace.traces.kernel_names import collective_kind
from headrace.traces.time_bounds import LONGEST_NS, span_ns, stamp_ns
from headrace.traces.timeline import Collective, Group, LinkLoad, PacketSizes, StepLanes, WaitTimes

TOTAL = "Total Op Info"
TRANSPORTS = ("HCCS", "PCIE", "RDMA", "SIO")
LOCAL = "LOCAL"
"""Copies inside one chip at 500 GB/s and more: no link at all."""

LARGE_PACKET_MB = {"RDMA": 0.5}
LARGE_PACKET_MB_ELSEWHERE = 32.0
"""Above these sizes msprof calls a packet large."""

_STEP_DIGITS = re.compile(r"(?<!\d)(\d{1,18})\s*$")
_MB, _MS_IN_NS = 1e6, 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationTime:
    """One operation of one rank in communication.json or CommAnalyzerTime."""

    step: int | None
    name: str
    group: str
    is_p2p: bool
    start_us: float | None
    elapse_ms: float
    transit_ms: float
    wait_ms: float
    idle_ms: float


def step_number(text: object) -> int | None:
    """`step50`, `50`, `ProfilerStep#50` -> 50; an empty step (no marks in the profile) -> None."""
    found = _STEP_DIGITS.search(str(text))
    return int(found.group(1)) if found else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises FormatError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except NOT_JSON as error:
        raise FormatError(f"{path} is broken: {error}") from error
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from error


def operation_time(step: object, key: str, is_p2p: bool, entry: Mapping[str, Any]) -> OperationTime | None:
    """A row from `"hcom_allReduce__586_0_1@<group>": {"Communication Time Info": ...}`."""
    info = entry.get("Communication Time Info", {})
    if key == TOTAL or "Elapse Time(ms)" not in info:
        return None
    name, _, group = key.partition("@")
    return OperationTime(
        step=step_number(step),
        name=name,
        group=group,
        is_p2p=is_p2p,
        start_us=info.get("Start Timestamp(us)"),
        elapse_ms=float(info["Elapse Time(ms)"]),
        transit_ms=float(info.get("Transit Time(ms)", 0)),
        wait_ms=float(info.get("Wait Time(ms)", 0)),
        idle_ms=float(info.get("Idle Time(ms)", 0)),
    )


def collective_of(row: OperationTime, groups: Mapping[str, Group]) -> Collective:
    """Operations have the same name on all ranks of their group, which pairs them without counting."""
    group = groups.get(row.group)
    return Collective(
        step=row.step,
        kind=collective_kind(row.name),
        start_ns=stamp_ns((row.start_us or 0) * 1000),
        duration_ns=span_ns(row.elapse_ms * _MS_IN_NS),
        group=group,
        key=f"{row.name}@{row.group}",
    )


def wait_times(rows: Iterable[OperationTime]) -> WaitTimes | None:
    """Sums over the collectives, from which the guide's wait ratio is made; None without any."""
    own = [row for row in rows if not row.is_p2p]
    if not own:
        return None
    return WaitTimes(
        elapse_ns=span_ns(sum(row.elapse_ms for row in own) * _MS_IN_NS),
        transit_ns=span_ns(sum(row.transit_ms for row in own) * _MS_IN_NS),
        wait_ns=span_ns(sum(row.wait_ms for row in own) * _MS_IN_NS),
        idle_ns=span_ns(sum(row.idle_ms for row in own) * _MS_IN_NS),
    )


def packet_sizes(entries: Iterable[Mapping[str, Any]]) -> tuple[PacketSizes, ...]:
    """Bytes and the share of them in large packets, per transport, from `Size Distribution` {MB: [count, ms]}."""
    total: defaultdict[str, float] = defaultdict(float)
    large: defaultdict[str, float] = defaultdict(float)
    num_packets: Counter[str] = Counter()
    for entry in entries:
        for transport, info in entry.get("Communication Bandwidth Info", {}).items():
            if transport not in TRANSPORTS:
                continue
            limit = LARGE_PACKET_MB.get(transport, LARGE_PACKET_MB_ELSEWHERE)
            for size, (count, _) in info.get("Size Distribution", {}).items():
                num_bytes = float(size) * _MB * count
                total[transport] += num_bytes
                num_packets[transport] += count
                large[transport] += num_bytes if float(size) > limit else 0.0
    return tuple(
        PacketSizes(
            transport=transport,
            num_bytes=num_bytes,
            mean_bytes=num_bytes / num_packets[transport],
            large_share=large[transport] / num_bytes,
        )
        for transport, num_bytes in total.items()
        if num_bytes > 0
    )


def link_load(
    step: object, link: str, entry: Mapping[str, Any], group: str, groups: Mapping[str, Group], *, local: bool
) -> LinkLoad | None:
    """A row from `"0-5": {"Transport Type": "HCCS", "Transit Size(MB)": ..., "Transit Time(ms)": ...}`.

    `local`: src and dst count inside the group, and are translated where its ranks are known.
    """
    src, _, dst = link.partition("-")
    transport = str(entry.get("Transport Type", ""))
    size_mb, time_ms = float(entry.get("Transit Size(MB)", 0)), float(entry.get("Transit Time(ms)", 0))
    if not (src.isdigit() and dst.isdigit()) or src == dst or transport == LOCAL or time_ms <= 0:
        return None
    if not isfinite(size_mb) or not time_ms * _MS_IN_NS <= LONGEST_NS:
        raise ValueError(f"{size_mb} MB in {time_ms} ms went over no link")
    ranks = groups[group].ranks if local and group in groups else None
    known = ranks is not None and int(src) < len(ranks) and int(dst) < len(ranks)
    return LinkLoad(
        step=step_number(step),
        src=ranks[int(src)] if ranks and known else int(src),
        dst=ranks[int(dst)] if ranks and known else int(dst),
        transport=transport,
        num_bytes=size_mb * _MB,
        time_ns=time_ms * _MS_IN_NS,
        group=group,
        ranks_are_local=local and not known,
    )


def matrix_classes(names: Iterable[str]) -> set[str]:
    """The classes to count: `<operation>-total` where there is one, else every operation by its own name."""
    own = {name for name in names if name != TOTAL}
    total = {name for name in own if name.partition("@")[0].endswith("-total")}
    return total or own


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace:
    """What step_trace_time.csv or cluster_step_trace_time.csv holds."""

    rows: tuple[tuple[dict[str, str], StepLanes], ...] = ()
    """The line as it stands there, and its lanes."""
    num_broken: int = 0
    """Lines left out: their times are none (inf, nan, text), or they are cut off."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of these lanes must know."""
        return (f"broken lines of the step table that were skipped: {self.num_broken}",) if self.num_broken else ()


def read_step_trace(path: Path) -> StepTrace:
    """Read either table; empty where there is none. Raises FormatError when it is another one."""
    if not path.is_file():
        return StepTrace()
    rows: list[tuple[dict[str, str], StepLanes]] = []
    num_broken = 0
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            for row in csv.DictReader(file):
                try:
                    rows.append((row, _lanes_of_line(row)))
                except (ValueError, TypeError):
                    num_broken += 1
    except (KeyError, UnicodeDecodeError, csv.Error) as error:
        raise FormatError(f"{path} is no step_trace_time.csv: {error!r}") from error
    return StepTrace(rows=tuple(rows), num_broken=num_broken)


def _lanes_of_line(row: Mapping[str, str]) -> StepLanes:
    return step_lanes(
        step=row.get("Step", ""),
        computing=row["Computing"],
        not_overlapped=row["Communication(Not Overlapped)"],
        communication=row["Communication"],
        overlapped=row["Overlapped"],
        free=row["Free"],
        bubble=row.get("Bubble") or 0,
        preparing=row.get("Preparing"),
    )


def step_lanes(
    *, step: object, computing: Any, not_overlapped: Any, communication: Any, overlapped: Any, free: Any, bubble: Any,
    preparing: Any,
) -> StepLanes:  # fmt: skip
    """Lanes from microseconds as Ascend prints them (`8827.472999999998`). e2e is the sum of its three parts."""
    computing_ns, free_ns, not_overlapped_ns = _ns(computing), _ns(free), _ns(not_overlapped)
    return StepLanes(
        step=step_number(step),
        e2e_ns=computing_ns + not_overlapped_ns + free_ns,
        computing_ns=computing_ns,
        communication_ns=not_overlapped_ns + _ns(overlapped),
        overlapped_ns=_ns(overlapped),
        bubble_ns=_ns(bubble),
        preparing_ns=None if preparing in (None, "") else _ns(preparing),
    )


def _ns(microseconds: Any) -> int:
    return span_ns(float(microseconds) * 1000)
