"""Writes small Ascend profiles, text and database, with the layout torch_npu gives them."""

from __future__ import annotations

import csv
import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ORIGIN_US = 1_736_408_883_000_000
GROUP = "17522688603477080586"


@dataclass(kw_only=True)
class Profile:
    """One rank and one step, times in us after ORIGIN_US: matrix and vector tasks, one all-reduce and its waits."""

    rank: int = 0
    step: int = 50
    matrix: list[tuple[float, float]] = field(default_factory=lambda: [(1000, 300)])
    vector: list[tuple[float, float]] = field(default_factory=lambda: [(1200, 200)])
    copies: list[tuple[float, float]] = field(default_factory=lambda: [(1450, 20)])
    all_reduce: tuple[float, float] = (1300, 1000)
    waits_us: dict[int, float] = field(default_factory=dict)
    links: dict[str, tuple[float, float]] = field(default_factory=dict)
    """"src-dst" -> (MB, ms) over HCCS."""
    receive: tuple[float, float] | None = None
    global_ranks: list[int] | None = None

    @property
    def operation(self) -> str:
        return "hcom_allReduce__586_0_1"


def stamp(us: float) -> str:
    """16 digits and 3 decimals, exact."""
    total = ORIGIN_US * 1000 + round(us * 1000)
    return f"{total // 1000}.{total % 1000:03d}"


def _complete(name: str, pid: int, tid: int, us: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"name": name, "pid": pid, "tid": tid, "ts": stamp(us), "dur": dur, "args": args, "ph": "X"}


def view_events(profile: Profile) -> list[dict[str, Any]]:
    hardware, hccl, python, cann = 20, 30, 1, 40
    events = [
        {"ph": "M", "name": "process_name", "pid": python, "tid": 0, "args": {"name": "Python"}},
        {
            "ph": "X", "name": f"ProfilerStep#{profile.step}", "pid": python, "tid": 1, "ts": stamp(500), "dur": 3000.0,
            "cat": "cpu_op", "args": {"Call stack": "a;\r\nb"},
        },
    ]  # fmt: skip
    ident = 900
    tasks = [("MatMul", "AI_CORE", *at) for at in profile.matrix]
    tasks += [("Add", "AI_VECTOR_CORE", *at) for at in profile.vector]
    tasks += [("MEMCPY_ASYNC", "PCIE_DMA_SQE", *at) for at in profile.copies]
    tasks += [("EVENT_WAIT", "EVENT_WAIT_SQE", 1005, 800)]
    for name, kind, at, dur in tasks:
        ident += 1
        arrow = {"name": f"HostToDevice{ident}", "cat": "HostToDevice", "id": str(ident)}
        events += [
            {**arrow, "ph": "s", "pid": cann, "tid": 1, "ts": stamp(at - 50)},
            _complete(name, hardware, 2, at, dur, **{"Task Type": kind, "connection_id": ident}),
            {**arrow, "ph": "f", "bp": "e", "pid": hardware, "tid": 2, "ts": stamp(at)},
        ]
    operations = [(profile.operation, profile.all_reduce)]
    if profile.receive:
        operations.append(("hcom_receive__586_1_1", profile.receive))
    for name, (at, dur) in operations:
        events.append(_complete(name, hccl, 0, at, dur, connection_id=1, data_type="FP32", count=1000, alg_type="MESH"))
    for peer, wait in profile.waits_us.items():
        ranks = {"src rank": profile.rank, "dst rank": peer, "notify_id": "7", "task type": "Notify_Wait"}
        events.append(_complete("Notify_Wait", hccl, 1 + peer, profile.all_reduce[0] + 1, wait, **ranks))
    events += [
        _complete("HcclAllreduce", cann, 1, 1250, 15),
        _complete("Computing", 50, 0, 1000, 400),
        {"ph": "C", "name": "HBM 0/Read", "pid": 60, "tid": 0, "ts": stamp(1), "args": {"Read(MB/s)": 0.0}},
    ]
    return events


def communication(profile: Profile) -> dict[str, Any]:
    elapse, wait = profile.all_reduce[1] / 1000, sum(profile.waits_us.values()) / 1000
    times = {
        "Start Timestamp(us)": ORIGIN_US + profile.all_reduce[0], "Elapse Time(ms)": elapse, "Transit Time(ms)": 0.2,
        "Wait Time(ms)": wait, "Synchronization Time(ms)": wait, "Idle Time(ms)": 0.0,
    }  # fmt: skip
    bandwidth = {"HCCS": {"Transit Size(MB)": 4.0, "Transit Time(ms)": 0.2, "Size Distribution": {"2.0": [2, 0.2]}}}
    entry = {"Communication Time Info": times, "Communication Bandwidth Info": bandwidth}
    collective = {f"{profile.operation}@{GROUP}": entry, "Total Op Info": entry}
    return {f"step{profile.step}": {"p2p": {}, "collective": collective}}


def matrix(profile: Profile) -> dict[str, Any]:
    total = {
        link: {"Transport Type": "HCCS", "Transit Size(MB)": mb, "Transit Time(ms)": ms, "Bandwidth(GB/s)": mb / ms}
        for link, (mb, ms) in profile.links.items()
    }
    local = {"Transport Type": "LOCAL", "Transit Size(MB)": 99, "Transit Time(ms)": 0.1, "Bandwidth(GB/s)": 990}
    classes = {f"allreduce-total@{GROUP}": total | {"0-0": local}, f"allreduce-top1@{GROUP}": total}
    return {f"step{profile.step}": {"p2p": {}, "collective": classes}}


def write_metadata(folder: Path, profile: Profile) -> Path:
    output = folder / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True, exist_ok=True)
    (folder / f"profiler_info_{profile.rank}.json").write_text(json.dumps({"rank_id": profile.rank}))
    metadata: dict[str, Any] = {"ENV_VARIABLES": {}}
    if profile.global_ranks is not None:
        metadata["parallel_group_info"] = {
            GROUP: {"group_name": "tp", "group_rank": 0, "global_ranks": profile.global_ranks}
        }
    (folder / "profiler_metadata.json").write_text(json.dumps(metadata))
    return output


def write_text(folder: Path, profile: Profile, *, view: bool = True) -> Path:
    output = write_metadata(folder, profile)
    if view:
        (output / "trace_view.json").write_text(json.dumps(view_events(profile)))
    (output / "communication.json").write_text(json.dumps(communication(profile)))
    (output / "communication_matrix.json").write_text(json.dumps(matrix(profile)))
    return folder


STEP_TRACE_HEADING = [
    "Step", "Computing", "Communication(Not Overlapped)", "Overlapped", "Communication", "Free", "Stage", "Bubble",
    "Communication(Not Overlapped and Exclude Receive)", "Preparing",
]  # fmt: skip


def write_step_trace(path: Path, rows: list[list[Any]], extra: list[str] | None = None) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(extra or []), *STEP_TRACE_HEADING])
        writer.writerows(rows)
    return path


def write_db(folder: Path, profile: Profile) -> Path:
    """The same profile as a database."""
    output = write_metadata(folder, profile)
    strings = {
        name: number
        for number, name in enumerate(
            ["AI_CORE", "AI_VECTOR_CORE", "MEMCPY_ASYNC", "Notify_Wait", profile.operation, GROUP, "MatMul"]
        )
    }
    with sqlite3.connect(output / f"ascend_pytorch_profiler_{profile.rank}.db") as db:
        db.executescript(
            """
            CREATE TABLE STRING_IDS (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE RANK_DEVICE_MAP (rankId INTEGER, deviceId INTEGER);
            CREATE TABLE HOST_INFO (hostUid TEXT, hostName TEXT);
            CREATE TABLE NPU_INFO (id INTEGER, name TEXT);
            CREATE TABLE STEP_TIME (id INTEGER, startNs INTEGER, endNs INTEGER);
            CREATE TABLE TASK (startNs INTEGER, endNs INTEGER, connectionId INTEGER, globalTaskId INTEGER,
                taskType INTEGER);
            CREATE TABLE COMPUTE_TASK_INFO (name INTEGER, globalTaskId INTEGER PRIMARY KEY, taskType INTEGER);
            CREATE TABLE CANN_API (startNs INTEGER, endNs INTEGER, connectionId INTEGER PRIMARY KEY);
            CREATE TABLE ENUM_HCCL_DATA_TYPE (id INTEGER PRIMARY KEY, name TEXT);
            CREATE TABLE COMMUNICATION_OP (opName INTEGER, startNs INTEGER, endNs INTEGER, connectionId INTEGER,
                groupName INTEGER, opId INTEGER PRIMARY KEY, dataType INTEGER, count NUMERIC);
            CREATE TABLE COMMUNICATION_TASK_INFO (globalTaskId INTEGER, taskType INTEGER, srcRank INTEGER,
                dstRank INTEGER, opId INTEGER);
            """
        )
        db.executemany("INSERT INTO STRING_IDS VALUES (?, ?)", [(number, name) for name, number in strings.items()])
        # The device is not the rank.
        db.execute("INSERT INTO RANK_DEVICE_MAP VALUES (?, ?)", (profile.rank, profile.rank + 4))
        db.execute("INSERT INTO HOST_INFO VALUES ('1', 'node7')")
        db.execute("INSERT INTO NPU_INFO VALUES (0, 'Ascend910B3')")
        db.execute("INSERT INTO ENUM_HCCL_DATA_TYPE VALUES (4, 'FP32')")
        db.execute("INSERT INTO STEP_TIME VALUES (?, ?, ?)", (profile.step, _ns(500), _ns(3500)))
        ident = 0
        for kind, rows in (
            ("AI_CORE", profile.matrix),
            ("AI_VECTOR_CORE", profile.vector),
            ("MEMCPY_ASYNC", profile.copies),
        ):
            for at, dur in rows:
                ident += 1
                db.execute(
                    "INSERT INTO TASK VALUES (?, ?, ?, ?, ?)", (_ns(at), _ns(at + dur), ident, ident, strings[kind])
                )
                db.execute("INSERT INTO CANN_API VALUES (?, ?, ?)", (_ns(at - 50), _ns(at - 45), ident))
                if kind != "MEMCPY_ASYNC":
                    db.execute(
                        "INSERT INTO COMPUTE_TASK_INFO VALUES (?, ?, ?)", (strings["MatMul"], ident, strings[kind])
                    )
        at, dur = profile.all_reduce
        operation = (strings[profile.operation], _ns(at), _ns(at + dur), 999, strings[GROUP], 1, 4, 1000)
        db.execute("INSERT INTO COMMUNICATION_OP VALUES (?, ?, ?, ?, ?, ?, ?, ?)", operation)
        for peer, wait in profile.waits_us.items():
            ident += 1
            row = (_ns(at + 1), _ns(at + 1 + wait), -1, ident, strings["Notify_Wait"])
            db.execute("INSERT INTO TASK VALUES (?, ?, ?, ?, ?)", row)
            info = (ident, strings["Notify_Wait"], profile.rank, peer, 1)
            db.execute("INSERT INTO COMMUNICATION_TASK_INFO VALUES (?, ?, ?, ?, ?)", info)
    return folder


def _ns(us: float) -> int:
    return ORIGIN_US * 1000 + round(us * 1000)
