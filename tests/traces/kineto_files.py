"""Writes small Kineto traces by hand, in every dialect the readers must understand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

MAIN, WORKER = 100, 200
STREAM, COMM_STREAM = 7, 20


def x(cat: str, name: str, ts: float, dur: float, *, tid: int = MAIN, **args: Any) -> dict[str, Any]:
    """A complete event; times in us. Underscores in argument names stand for blanks where torch writes blanks."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def step(number: int, ts: float, dur: float) -> dict[str, Any]:
    return x("user_annotation", f"ProfilerStep#{number}", ts, dur)


def launched(correlation: int, call_ts: float, cat: str, name: str, ts: float, dur: float, **args: Any):
    """A runtime call and the device task it launched."""
    return [
        x("cuda_runtime", "cudaLaunchKernel", call_ts, 1.0, correlation=correlation),
        x(cat, name, ts, dur, tid=STREAM, correlation=correlation, stream=STREAM, **args),
    ]


def nccl(
    ts: float, dur: float, *, correlation: int = -1, kind: str = "allreduce", ranks=(0, 1), n: int = 1024, seq=None
):
    """An NCCL kernel with torch's metadata."""
    args = {
        "Collective name": kind,
        "In msg nelems": n,
        "Out msg nelems": n,
        "Group size": len(ranks),
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": str(list(ranks)),
    }
    if seq is not None:
        args["Seq"] = seq
    if correlation >= 0:
        args["correlation"] = correlation
    return x("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", ts, dur, **args)


def gloo(name: str, ts: float, dur: float, shape=(1000,)) -> dict[str, Any]:
    dims, types = [list(shape)], ["float"]
    return x("user_annotation", f"gloo:{name}", ts, dur, tid=WORKER, **{"Input Dims": dims, "Input type": types})


def envelope(rank: int | None = 0, world_size: int | None = 2, groups=None, **extra: Any) -> dict[str, Any]:
    info: dict[str, Any] = {"backend": "nccl"}
    if rank is not None:
        info["rank"] = rank
    if world_size is not None:
        info["world_size"] = world_size
        groups = [list(range(world_size))] if groups is None else groups
        info["pg_config"] = [
            {"pg_name": str(n), "pg_desc": "pg", "pg_size": len(ranks), "ranks": ranks}
            for n, ranks in enumerate(groups)
        ]
    return {"schemaVersion": 1, "distributedInfo": info, "baseTimeNanoseconds": 1_700_000_000_000_000_000, **extra}


def write(path: Path, events: list[dict[str, Any]], head: dict[str, Any] | None = None, *, pretty: bool = True) -> Path:
    """As kineto writes: the envelope around the events, gzip when the name says so."""
    head = envelope() if head is None else head
    body = json.dumps(head)[1:-1]
    separator = ",\n  " if pretty else ","
    text = "{" + (body + ", " if body else "") + '"traceEvents": [' + separator.join(map(json.dumps, events)) + "]}"
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def gloo_job(
    folder: Path, late_ms: dict[int, float], *, steps: int = 4, offset_us: dict[int, float] | None = None
) -> Path:
    """A CPU job: per step a block of operators (rank r needs `late_ms[r]` more), then an all-reduce and an all-gather.

    Whoever is early waits: gloo's ranges end together on all ranks. `offset_us` shifts a rank's whole clock.
    """
    folder.mkdir(exist_ok=True)
    offset_us = offset_us or {}
    longest = max(late_ms.values())
    for rank, extra in late_ms.items():
        shift = offset_us.get(rank, 0.0)
        events = []
        for number in range(steps):
            begin = shift + 1000.0 + number * (30_000 + longest * 1000)
            busy = 10_000.0 + extra * 1000
            arrive, leave = begin + busy, begin + 10_000 + longest * 1000 + 3_000
            events += [
                step(number, begin, leave - begin + 4_000),
                x("cpu_op", "demo::dense_block", begin + 10, busy - 20),
                gloo("all_reduce", arrive, leave - arrive, (4000,)),
                x("cpu_op", "aten::relu", leave + 10, 500),
                gloo("all_gather", leave + 600, 1_000 + rank, (100,)),
            ]
        head = envelope(rank, len(late_ms), host_name="node0")
        head["distributedInfo"]["backend"] = "gloo"
        write(folder / f"rank_{rank}.json", events, head)
    return folder
