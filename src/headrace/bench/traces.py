"""How fast is a trace read and broken down, beside HolisticTraceAnalysis? The body of `headrace bench traces`.

Four things, on generated files (see generated_trace.py):

    breakdown     one file of 54 MB, 216 k events: load + breakdown, each in a fresh process, in turns; imports are not
                  timed, peak memory is the whole process, interpreter included
    eight ranks   `headrace analyze` on eight such files beside one: reading is spread over the cores
    large         one file of 1 GB: peak memory

Isolates: a file in the page cache to numbers in memory. Held fixed: the same file for both, and both must find the same
idle and computing time, but for the microsecond per kernel to which HTA rounds. How it can mislead: times are of this
machine's page cache; HTA keeps every event for other questions, headrace only what its own need; on a busy machine wall
times favour the one that happens to run alone, so each run's CPU time is kept beside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.bench.figure import Figure, as_records
from headrace.bench.generated_trace import TraceShape, write_gpu_trace
from headrace.errors import ConfigError, HeadraceError
from headrace.measure.environment import capture_environment
from headrace.measure.statistics import median, p99, ratio_interval

RECORD_VERSION = 1
ISOLATES = "a trace in the page cache to its breakdown in memory"

EIGHT = 8
LARGE_BYTES = 1_000_000_000
LARGE_MAY_HOLD_BYTES = 400_000_000
SLACK = 1.3
"""Eight ranks on c cores may take this times 8 / c times one rank's time."""

_HEADRACE = """
import json, sys, time
from pathlib import Path
from headrace.traces.kineto import read_kineto
start, cpu_start = time.perf_counter(), time.process_time()
trace = read_kineto(Path(sys.argv[1]))
seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
lanes = dict(trace.windows)["window_without_last_step"]
answer = [lanes.idle_ns / 1000, lanes.computing_ns / 1000, trace.launch_delay.num_launches]
"""
_HTA = """
import contextlib, io, json, logging, sys, time
from pathlib import Path
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
with contextlib.redirect_stdout(io.StringIO()):
    start, cpu_start = time.perf_counter(), time.process_time()
    table = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="").get_temporal_breakdown(visualize=False)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
row = table.to_dict("records")[0]
answer = [float(row["idle_time(us)"]), float(row["compute_time(us)"])]
"""
_TELL = """
# Not ru_maxrss: across fork and exec it remembers the parent's peak.
status = Path("/proc/self/status").read_text()
peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
print("RESULT", json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak, "answer": answer}))
"""


def run(
    *,
    hta_python: Path | None = None,
    num_rounds: int = 11,
    shape: TraceShape | None = None,
    large_bytes: int = LARGE_BYTES,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Measure and return the JSON-able record.

    `hta_python` is an interpreter that has HolisticTraceAnalysis (it pulls in much, so it rarely shares an environment
    with headrace); default: this one, if it has it. Without any, `hta_over_headrace` is None and `skipped` says so.
    `large_bytes` 0 leaves the large file out. Files are written below `folder` (default: a temporary one) and removed.
    """
    if num_rounds < 1 or large_bytes < 0:
        raise ConfigError(f"num_rounds must be at least 1 and large_bytes not negative: {num_rounds}, {large_bytes}")
    shape = shape or TraceShape()
    interpreter = _interpreter_with_hta(hta_python)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-traces-", dir=folder) as name:
        place = Path(name)
        path = place / "rank0.json"
        num_events = write_gpu_trace(path, rank=0, world_size=EIGHT, shape=shape)
        file_bytes = path.stat().st_size
        runs = _take_turns(path, interpreter, num_rounds)
        eight = _eight_ranks(place / "eight", shape, path, num_rounds)
        large = _large(place, shape, file_bytes, large_bytes) if large_bytes else None
    summary = _summarise(runs, file_bytes)
    return {
        "version": RECORD_VERSION,
        "isolates": ISOLATES,
        "environment": asdict(capture_environment()),
        "file_bytes": file_bytes,
        "num_events": num_events,
        "rows": _rows(runs),
        "eight_ranks": eight,
        "large": large,
        "skipped": {} if interpreter else {"hta": "HolisticTraceAnalysis is not installed; give --hta-python"},
        "figures": as_records(_figures(summary, eight, large)),
        "summary": summary,
    }


def _interpreter_with_hta(given: Path | None) -> Path | None:
    if given is None:
        return Path(sys.executable) if importlib.util.find_spec("hta") is not None else None
    try:
        probe = subprocess.run([given, "-c", "import hta"], capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"--hta-python {given} cannot be run: {error.strerror}") from error
    if probe.returncode:
        raise ConfigError(f"--hta-python {given} has no HolisticTraceAnalysis: {probe.stderr.strip()[-200:]}")
    return given


def _take_turns(path: Path, hta_python: Path | None, num_rounds: int) -> dict[str, list[dict[str, Any]]]:
    contenders = {"headrace": (Path(sys.executable), _HEADRACE)}
    if hta_python is not None:
        contenders["hta"] = (hta_python, _HTA)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for number in range(num_rounds):
        names = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        for name in names:
            runs[name].append(_in_fresh_process(*contenders[name], path))
    if "hta" in runs:
        *ours, num_tasks = runs["headrace"][0]["answer"]
        theirs = runs["hta"][0]["answer"]
        if any(abs(own - other) > num_tasks for own, other in zip(ours, theirs, strict=True)):
            raise HeadraceError(f"the contenders disagree on idle and computing time in us: {ours} and {theirs}")
    return runs


def _in_fresh_process(python: Path, script: str, path: Path) -> dict[str, Any]:
    done = subprocess.run([python, "-c", script + _TELL, path], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise HeadraceError(f"{python} failed on {path}: {done.stderr.strip()[-500:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def _eight_ranks(folder: Path, shape: TraceShape, first: Path, num_rounds: int) -> dict[str, Any]:
    """The whole command on one rank and on eight, in turns; wall time with the interpreter's start."""
    folder.mkdir()
    for rank in range(EIGHT):
        write_gpu_trace(folder / f"rank{rank}.json", rank=rank, world_size=EIGHT, shape=shape)
    one_s: list[float] = []
    eight_s: list[float] = []
    for _ in range(max(1, num_rounds // 2)):
        one_s.append(_command_s(first))
        eight_s.append(_command_s(folder))
    cores = len(os.sched_getaffinity(0))
    return {
        "cores": cores,
        "one_s": one_s,
        "eight_s": eight_s,
        "eight_over_one": (median(eight_s) or 0) / (median(one_s) or 1),
        "allowed": SLACK * EIGHT / min(cores, EIGHT),
    }


def _command_s(path: Path) -> float:
    command = [sys.executable, "-c", "from headrace.cli import main; main()", "analyze", str(path)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise HeadraceError(f"headrace analyze {path} failed: {done.stderr.strip()[-500:]}")
    return time.perf_counter() - start


def _large(folder: Path, shape: TraceShape, file_bytes: int, large_bytes: int) -> dict[str, Any]:
    """The same trace with as many steps as the size takes."""
    num_steps = max(2, round(shape.num_steps * large_bytes / file_bytes))
    path = folder / "large.json"
    longer = TraceShape(num_steps=num_steps, launches_per_step=shape.launches_per_step)
    num_events = write_gpu_trace(path, world_size=EIGHT, shape=longer)
    result = _in_fresh_process(Path(sys.executable), _HEADRACE, path)
    return {
        "file_bytes": path.stat().st_size,
        "num_events": num_events,
        "seconds": result["seconds"],
        "peak_bytes": result["peak_bytes"],
    }


def _rows(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for name, own in runs.items():
        values_s = [result["seconds"] for result in own]
        cpu_values_s = [result["cpu_seconds"] for result in own]
        rows.append(
            {
                "contender": name,
                "median_s": median(values_s),
                "p99_s": p99(values_s),
                "values_s": values_s,
                "cpu_median_s": median(cpu_values_s),
                "cpu_values_s": cpu_values_s,
                "peak_bytes": max(result["peak_bytes"] for result in own),
            }
        )
    return rows


def _summarise(runs: dict[str, list[dict[str, Any]]], file_bytes: int) -> dict[str, Any]:
    """`_95` is an interval from six rounds on, else (None, None)."""
    summary: dict[str, Any] = {}
    for key, time_of in (("hta_over_headrace", "seconds"), ("hta_over_headrace_cpu", "cpu_seconds")):
        summary |= {key: None, f"{key}_95": None}
        if "hta" in runs:
            found = ratio_interval(*([result[time_of] for result in runs[name]] for name in ("hta", "headrace")))
            summary |= {key: found.estimate, f"{key}_95": (found.low, found.high)}
    return summary | {"peak_over_file": max(result["peak_bytes"] for result in runs["headrace"]) / file_bytes}


def _figures(summary: dict[str, Any], eight: dict[str, Any], large: dict[str, Any] | None) -> Sequence[Figure]:
    return (
        Figure(
            what="load and breakdown beside HolisticTraceAnalysis, times faster",
            target=35,
            reached_by="at least",
            value=summary["hta_over_headrace"],
        ),
        Figure(what="peak memory over file size", target=3, reached_by="at most", value=summary["peak_over_file"]),
        Figure(
            what=f"eight ranks over one, on {eight['cores']} cores",
            target=eight["allowed"],
            reached_by="at most",
            value=eight["eight_over_one"],
        ),
        Figure(
            what="peak bytes for a file of 1 GB",
            target=LARGE_MAY_HOLD_BYTES,
            reached_by="at most",
            value=None if large is None else large["peak_bytes"],
        ),
    )
