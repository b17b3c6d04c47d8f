"""Merged tables of a whole cluster, `cluster_analysis_output`: JSON and CSV files, or cluster_analysis.db.

    cluster_communication.json          {ranks of the group: {step: {operation: {rank: times}}}}
    cluster_communication_matrix.json   {ranks of the group: {step: {operation or class: {"src-dst": load}}}}
    communication_group.json            all groups
    cluster_step_trace_time.csv         one row per step and rank; rows of type `stage` repeat their ranks' maximum

Ranks are global here. The merge keeps no timeline: durations are exact, whom a rank waited for is lost.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import FormatError
from headrace.traces.ascend_db import open_immutable, tables_of
from headrace.traces.ascend_tables import (
    OperationTime,
    StepTrace,
    collective_of,
    link_load,
    matrix_classes,
    operation_time,
    packet_sizes,
    read_json,
    read_step_trace,
    step_lanes,
    step_number,
    wait_times,
)
from headrace.traces.distributed_info import parse_ranks
from headrace.traces.timeline import Group, LinkLoad, RankTrace, StepLanes

FOLDER = "cluster_analysis_output"
FILES = (
    "cluster_communication.json",
    "cluster_communication_matrix.json",
    "cluster_step_trace_time.csv",
    "cluster_analysis.db",
)


@dataclass(kw_only=True, slots=True)
class _Cluster:
    """What was found, by rank."""

    operations: defaultdict[int, list[OperationTime]] = field(default_factory=lambda: defaultdict(list))
    packets: defaultdict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    links: list[LinkLoad] = field(default_factory=list)
    lanes: defaultdict[int, list[StepLanes]] = field(default_factory=lambda: defaultdict(list))
    stages: dict[int, int] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    """Group id -> ranks."""
    declared: list[Group] = field(default_factory=list)
    step_trace: StepTrace = field(default_factory=StepTrace)


def is_cluster_output(folder: Path) -> bool:
    """Does the folder hold any of the merged tables?"""
    return any((folder / name).is_file() for name in FILES)


def read_cluster_output(folder: Path) -> tuple[RankTrace, ...]:
    """Read the merged tables; one RankTrace per rank in them. Raises FormatError."""
    cluster = _Cluster()
    _read_files(folder, cluster)
    if (folder / "cluster_analysis.db").is_file():
        _read_database(folder / "cluster_analysis.db", cluster)
    ranks = sorted({*cluster.operations, *cluster.lanes})
    if not ranks and not cluster.links:
        raise FormatError(f"{folder} names no rank: none of {', '.join(FILES)} has a row")
    ranks = ranks or [min(load.src for load in cluster.links)]
    everyone = {rank for group in (*cluster.groups.values(), *cluster.declared) for rank in group.ranks}
    world_size = max(everyone) + 1 if everyone else None
    return tuple(_rank_trace(folder, cluster, rank, ranks, world_size) for rank in ranks)


def _rank_trace(folder: Path, cluster: _Cluster, rank: int, ranks: list[int], world_size: int | None) -> RankTrace:
    rows = cluster.operations[rank]
    # A link is told by its sender; one whose sender was not traced is kept with the first rank.
    links = [load for load in cluster.links if load.src == rank or (rank == ranks[0] and load.src not in ranks)]
    lanes = tuple(sorted(cluster.lanes[rank], key=lambda step: -1 if step.step is None else step.step))
    notes = ["merged tables: durations only, whom a rank waited for is not in them"]
    step_trace = cluster.step_trace if rank == ranks[0] else StepTrace()  # a broken line is of no rank: told once
    notes += step_trace.notes
    if not lanes:
        notes.append("no cluster_step_trace_time: there is no breakdown")
    return RankTrace(
        rank=rank,
        source=str(folder),
        format="ascend_cluster",
        device="npu",
        world_size=world_size,
        stage=cluster.stages.get(rank),
        lanes=lanes,
        published=lanes,
        collectives=tuple(collective_of(row, cluster.groups) for row in rows),
        groups=tuple(cluster.declared),
        links=tuple(links),
        packets=packet_sizes(cluster.packets[rank]),
        wait_times=wait_times(rows),
        skipped_events=step_trace.num_broken,
        notes=tuple(notes),
    )


def _read_files(folder: Path, cluster: _Cluster) -> None:
    path = folder / "communication_group.json"
    if path.is_file():
        for kind, groups in read_json(path).items():
            members = [parse_ranks(ranks) for ranks in groups] if isinstance(groups, list) else []
            cluster.declared += [Group(name=kind, ranks=tuple(sorted(ranks))) for ranks in members if ranks]
    path = folder / "cluster_communication.json"
    if path.is_file():
        for ranks, step, operation, entries in _nested(path):
            _learn_group(cluster, ranks, operation)
            for rank, entry in entries.items():
                row = operation_time(step, operation, ranks == "p2p", entry)
                if row is not None and rank.isdigit():
                    cluster.operations[int(rank)].append(row)
                    cluster.packets[int(rank)].append(entry)
    path = folder / "cluster_communication_matrix.json"
    if path.is_file():
        wanted = matrix_classes(operation for _, _, operation, _ in _nested(path))
        for _, step, operation, links in _nested(path):
            if operation in wanted:
                _add_links(cluster, step, operation.partition("@")[2], links.items())
    cluster.step_trace = read_step_trace(folder / "cluster_step_trace_time.csv")
    for line, lanes in cluster.step_trace.rows:
        if line.get("Type", "rank") == "rank" and (line.get("Index") or "").strip().isdigit():
            _add_lanes(cluster, int(line["Index"]), lanes, line.get("PP Index"))


def _nested(path: Path) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(group's ranks or "p2p", step, operation, entries)."""
    for ranks, steps in read_json(path).items():
        for step, operations in (steps or {}).items():
            for operation, entries in (operations or {}).items():
                yield ranks, step, operation, entries


def _learn_group(cluster: _Cluster, ranks: str, operation: str) -> None:
    members, group_id = parse_ranks(ranks), operation.partition("@")[2]
    if members and group_id:
        cluster.groups[group_id] = Group(name=group_id, ranks=tuple(sorted(members)))


def _add_links(cluster: _Cluster, step: str, group: str, links: Any) -> None:
    for link, entry in links:
        if (load := link_load(step, link, entry, group, cluster.groups, local=False)) is not None:
            cluster.links.append(load)


def _add_lanes(cluster: _Cluster, rank: int, lanes: StepLanes, stage: object) -> None:
    cluster.lanes[rank].append(lanes)
    if isinstance(stage, int) or (isinstance(stage, str) and stage.isdigit()):
        cluster.stages[rank] = int(stage)


def _read_database(path: Path, cluster: _Cluster) -> None:
    """The tables changed their names: ClusterCommAnalyzer* and CommunicationGroup are the older ones."""
    with open_immutable(path) as db:
        tables = tables_of(db)
        for name in ("CommunicationGroupMapping", "CommunicationGroup"):
            if name in tables:
                _learn_groups_of_table(db, name, cluster)
        for name in ("ClusterCommunicationTime", "ClusterCommAnalyzerTime"):
            if name in tables:
                _read_times(db, name, cluster)
                break
        for name in ("ClusterCommunicationMatrix", "ClusterCommAnalyzerMatrix"):
            if name in tables:
                _read_matrix(db, name, cluster)
                break
        if "ClusterStepTraceTime" in tables and not cluster.lanes:
            _read_steps(db, cluster)


def _learn_groups_of_table(db: sqlite3.Connection, table: str, cluster: _Cluster) -> None:
    for row in _rows(db, table):
        members = parse_ranks(row.get("rank_set"))
        if not members:
            continue
        group = Group(
            name=str(row.get("pg_name") or row.get("group_id") or row.get("type")), ranks=tuple(sorted(members))
        )
        cluster.declared.append(group)
        for key in ("group_name", "group_id"):
            if row.get(key):
                cluster.groups[str(row[key])] = group


def _read_times(db: sqlite3.Connection, table: str, cluster: _Cluster) -> None:
    for row in _rows(db, table):
        name = str(row["hccl_op_name"])
        if name == "Total Op Info":
            continue
        elapse = row.get("elapsed_time", row.get("elapse_time"))
        cluster.operations[int(row["rank_id"])].append(
            OperationTime(
                step=step_number(row["step"]),
                name=name.partition("@")[0],
                group=str(row.get("group_name", "")),
                is_p2p="send" in name.lower() or "rece" in name.lower(),
                start_us=row.get("start_timestamp"),
                elapse_ms=float(elapse or 0),
                transit_ms=float(row.get("transit_time") or 0),
                wait_ms=float(row.get("wait_time") or 0),
                idle_ms=float(row.get("idle_time") or 0),
            )
        )


def _read_matrix(db: sqlite3.Connection, table: str, cluster: _Cluster) -> None:
    rows = list(_rows(db, table))
    wanted = matrix_classes(str(row["hccl_op_name"]) for row in rows)
    for row in rows:
        if row["hccl_op_name"] in wanted:
            entry = {
                "Transport Type": row["transport_type"],
                "Transit Size(MB)": row["transit_size"],
                "Transit Time(ms)": row["transit_time"],
            }
            link = (f"{row['src_rank']}-{row['dst_rank']}", entry)
            _add_links(cluster, str(row["step"]), str(row.get("group_name", "")), [link])


def _read_steps(db: sqlite3.Connection, cluster: _Cluster) -> None:
    for row in _rows(db, "ClusterStepTraceTime"):
        if row["type"] != "rank" or not str(row["index"]).isdigit():
            continue
        lanes = step_lanes(
            step=row["step"],
            computing=row["computing"],
            not_overlapped=row["communication_not_overlapped"],
            communication=row["communication"],
            overlapped=row["overlapped"],
            free=row["free"],
            bubble=row.get("bubble") or 0,
            preparing=row.get("preparing"),
        )
        _add_lanes(cluster, int(row["index"]), lanes, row.get("pp_index"))


def _rows(db: sqlite3.Connection, table: str) -> Iterator[dict[str, Any]]:
    cursor = db.execute(f'SELECT * FROM "{table}"')  # `table` is one of the names above, never input
    names = [column[0] for column in cursor.description]
    for values in cursor:
        yield dict(zip(names, values, strict=True))
