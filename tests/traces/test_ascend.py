"""Ascend profiles: text, database and merged tables say the same; the input folder is never written to."""

from __future__ import annotations

import json
import sqlite3

import pytest

from headrace.errors import FormatError
from headrace.traces.ascend_cluster import read_cluster_output
from headrace.traces.ascend_db import read_ascend_db
from headrace.traces.ascend_text import read_ascend_text
from headrace.traces.timeline import NO_LAUNCH

from .ascend_files import GROUP, Profile, communication, matrix, write_db, write_step_trace, write_text


def lanes_of(trace):
    (lanes,) = trace.lanes
    return lanes


@pytest.mark.parametrize(("write", "read"), [(write_text, read_ascend_text), (write_db, read_ascend_db)])
def test_the_timeline_gives_exact_lanes_in_both_exports(tmp_path, write, read):
    trace = read(write(tmp_path / "rank3_ascend_pt", Profile(rank=3, waits_us={5: 900, 1: 10})))
    lanes = lanes_of(trace)
    assert (trace.rank, lanes.step) == (3, 50)
    assert lanes.computing_ns == 400_000  # [1000, 1300) and [1200, 1400)
    assert lanes.matrix_ns == 300_000
    assert lanes.communication_ns == 1_000_000
    assert lanes.overlapped_ns == 100_000
    assert lanes.e2e_ns == 1_300_000
    assert lanes.free_ns == 0
    assert lanes.copies_ns == 20_000
    assert lanes.preparing_ns == 500_000
    assert {wait.peer: wait.wait_ns for wait in trace.peer_waits} == {5: 900_000, 1: 10_000}
    assert trace.launch_delay.p50_us == 50.0


def test_copies_before_the_first_kernel_do_not_stretch_the_step(tmp_path):
    trace = read_ascend_text(write_text(tmp_path / "r", Profile(copies=[(600, 50), (1350, 20)])))
    assert lanes_of(trace).e2e_ns == 1_300_000
    assert lanes_of(trace).preparing_ns == 500_000


def test_a_receive_is_the_bubble(tmp_path):
    trace = read_ascend_text(write_text(tmp_path / "r", Profile(receive=(2500, 300))))
    lanes = lanes_of(trace)
    assert (lanes.bubble_ns, lanes.exposed_bubble_ns, lanes.free_ns) == (300_000, 300_000, 200_000)
    assert {collective.kind for collective in trace.collectives} == {"all_reduce", "recv"}


def test_the_hosts_call_of_a_collective_is_no_collective(tmp_path):
    trace = read_ascend_text(write_text(tmp_path / "r", Profile()))
    assert [collective.key for collective in trace.collectives] == ["hcom_allReduce__586_0_1"]


def test_groups_translate_local_ranks(tmp_path):
    profile = Profile(rank=9, waits_us={2: 500}, links={"1-2": (30, 2), "1-0": (30, 2)}, global_ranks=[8, 9, 10, 11])
    profile.waits_us = {2: 500}
    folder = write_text(tmp_path / "r", profile)
    events = json.loads((folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text())
    for event in events:  # inside its group rank 9 is rank 1
        if event["name"] == "Notify_Wait":
            event["args"]["src rank"] = 1
    (folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").write_text(json.dumps(events))
    trace = read_ascend_text(folder)
    assert [wait.peer for wait in trace.peer_waits] == [10]
    assert sorted((load.src, load.dst, load.ranks_are_local) for load in trace.links) == [(9, 8, False), (9, 10, False)]
    assert trace.collectives[0].group.ranks == (8, 9, 10, 11)
    assert not any("parallel_group_info" in note for note in trace.notes)


def test_without_groups_links_stay_local_and_a_note_says_so(tmp_path):
    trace = read_ascend_text(write_text(tmp_path / "r", Profile(links={"0-1": (30, 2)}, waits_us={1: 1})))
    assert trace.links[0].ranks_are_local
    assert any("parallel_group_info" in note for note in trace.notes)


def test_the_matrix_counts_totals_only_and_drops_local_copies(tmp_path):
    trace = read_ascend_text(write_text(tmp_path / "r", Profile(links={"0-1": (30, 2), "0-2": (15, 1)})))
    assert sorted((load.src, load.dst, load.num_bytes) for load in trace.links) == [(0, 1, 30e6), (0, 2, 15e6)]


def test_total_op_info_is_not_an_operation(tmp_path):
    profile = Profile(waits_us={1: 300})
    trace = read_ascend_text(write_text(tmp_path / "r", profile))
    assert trace.wait_times.elapse_ns == 1_000_000
    assert trace.wait_times.wait_ns == 300_000
    assert trace.packets[0].mean_bytes == 2e6


def test_tables_alone_are_enough_for_a_report(tmp_path):
    folder = write_text(tmp_path / "r", Profile(rank=1), view=False)
    row = [50, 400.0000001, 900.0, 100.0, 1000.0, 8.472999999998, 1308.5, 0, 900.0, 17902.5]
    write_step_trace(folder / "ASCEND_PROFILER_OUTPUT" / "step_trace_time.csv", [row])
    trace = read_ascend_text(folder)
    lanes = lanes_of(trace)
    assert (lanes.computing_ns, lanes.not_overlapped_ns, lanes.overlapped_ns) == (400_000, 900_000, 100_000)
    assert (lanes.free_ns, lanes.preparing_ns) == (8_473, 17_902_500)
    assert [collective.key for collective in trace.collectives] == [f"hcom_allReduce__586_0_1@{GROUP}"]
    assert any("no trace_view.json" in note for note in trace.notes)


def test_a_device_id_column_and_an_empty_step_are_read(tmp_path):
    folder = write_text(tmp_path / "rank2_ascend_pt", Profile(rank=2), view=False)
    row = [5, "", 400.0, 900.0, 100.0, 1000.0, 8.0, 1308.0, 0, 900.0, ""]
    write_step_trace(folder / "ASCEND_PROFILER_OUTPUT" / "step_trace_time.csv", [row], ["Device_id"])
    trace = read_ascend_text(folder)
    assert trace.rank == 2
    assert lanes_of(trace).step is None
    assert lanes_of(trace).preparing_ns is None


def test_a_view_without_marks_takes_the_only_step_of_the_table(tmp_path):
    folder = write_text(tmp_path / "r", Profile())
    view = folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json"
    events = [event for event in json.loads(view.read_text()) if not event["name"].startswith("ProfilerStep")]
    view.write_text(json.dumps(events))
    row = [50, 400.0, 900.0, 100.0, 1000.0, 0.0, 1300.0, 0, 900.0, 0]
    table = write_step_trace(folder / "ASCEND_PROFILER_OUTPUT" / "step_trace_time.csv", [row])
    assert lanes_of(read_ascend_text(folder)).step == 50
    write_step_trace(table, [row, [51, *row[1:]]])
    assert [lanes.step for lanes in read_ascend_text(folder).lanes] == [50, 51]


def test_metadata_only_is_a_named_error(tmp_path):
    folder = tmp_path / "rank0_ascend_pt"
    folder.mkdir()
    (folder / "profiler_info_0.json").write_text("{}")
    with pytest.raises(FormatError, match="metadata only"):
        read_ascend_text(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [("communication.json", "{broken"), ("step_trace_time.csv", "Step,Computing\n1,x\n"), ("communication.json", "[]")],
)
def test_broken_tables_are_named(tmp_path, name, content):
    folder = write_text(tmp_path / "r", Profile(), view=False)
    (folder / "ASCEND_PROFILER_OUTPUT" / name).write_text(content)
    with pytest.raises(FormatError, match=name):
        read_ascend_text(folder)


def test_a_database_in_wal_mode_and_a_read_only_folder_are_left_as_they_are(tmp_path):
    folder = write_db(tmp_path / "rank0_ascend_pt", Profile(waits_us={1: 5}))
    output = folder / "ASCEND_PROFILER_OUTPUT"
    path = output / "ascend_pytorch_profiler_0.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = WAL")
    db.close()
    for leftover in output.glob("*-*"):
        leftover.unlink()
    before = {file: file.read_bytes() for file in output.iterdir()}
    output.chmod(0o555)
    try:
        trace = read_ascend_db(folder)
    finally:
        output.chmod(0o755)
    assert trace.rank == 0
    assert {file: file.read_bytes() for file in output.iterdir()} == before


def test_the_database_tells_host_chip_and_a_rank_that_is_not_the_device(tmp_path):
    trace = read_ascend_db(write_db(tmp_path / "some_ascend_pt", Profile(rank=2)))
    assert (trace.rank, trace.host, trace.chip) == (2, "node7", "Ascend910B3")
    assert trace.collectives[0].key == f"hcom_allReduce__586_0_1@{GROUP}"
    assert trace.collectives[0].num_bytes == 4000


def test_an_unknown_call_is_no_launch(tmp_path):
    folder = write_db(tmp_path / "r", Profile())
    with sqlite3.connect(folder / "ASCEND_PROFILER_OUTPUT" / "ascend_pytorch_profiler_0.db") as db:
        db.execute("DELETE FROM CANN_API")
    db.close()
    trace = read_ascend_db(folder)
    assert trace.launch_delay is None
    assert lanes_of(trace).unknown_ns == lanes_of(trace).idle_ns
    assert NO_LAUNCH == -(2**63)


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 100])
def test_what_is_no_database_is_named(tmp_path, content):
    folder = write_db(tmp_path / "r", Profile())
    path = folder / "ASCEND_PROFILER_OUTPUT" / "ascend_pytorch_profiler_0.db"
    path.write_bytes(content)
    if content:
        with pytest.raises(FormatError, match="cannot be read as an Ascend database"):
            read_ascend_db(folder)
    else:
        assert read_ascend_db(folder).lanes == ()  # an empty file is a database without tables


def merged(profiles):
    times, links = {}, {}
    for profile in profiles:
        step = f"step{profile.step}"
        for operation, entry in communication(profile)[step]["collective"].items():
            times.setdefault("(0, 1)", {}).setdefault(step, {}).setdefault(operation, {})[str(profile.rank)] = entry
        for name, entries in matrix(profile)[step]["collective"].items():
            links.setdefault("(0, 1)", {}).setdefault(step, {}).setdefault(name, {}).update(entries)
    return times, links


def test_merged_tables_give_every_rank_its_own(tmp_path):
    profiles = [Profile(rank=0, all_reduce=(0, 5000), links={"0-1": (30, 2)}), Profile(rank=1, all_reduce=(0, 2000))]
    times, links = merged(profiles)
    (tmp_path / "cluster_communication.json").write_text(json.dumps(times))
    (tmp_path / "cluster_communication_matrix.json").write_text(json.dumps(links))
    (tmp_path / "communication_group.json").write_text(json.dumps({"collective": [[0, 1]], "p2p": [[0, 1, 2, 3]]}))
    row = [400.0, 900.0, 100.0, 1000.0, 8.0, 1308.0, 0, 900.0, 0]
    rows = [[50, "rank", "0", *row], [50, "rank", "1", *row], [50, "stage", "(0, 1)", *row]]
    path = write_step_trace(tmp_path / "cluster_step_trace_time.csv", rows)
    text = path.read_text().replace("Step,Computing", "Step,Type,Index,Computing")
    path.write_text(text)
    first, second = read_cluster_output(tmp_path)
    assert (first.rank, second.rank, first.world_size) == (0, 1, 4)
    assert [own.duration_ns for own in (first.collectives[0], second.collectives[0])] == [5_000_000, 2_000_000]
    assert first.collectives[0].group.ranks == (0, 1)
    assert [(load.src, load.dst) for load in first.links] == [(0, 1)]
    assert lanes_of(first).computing_ns == 400_000


@pytest.mark.parametrize("old", [True, False])
def test_the_merged_database_is_read_under_both_of_its_schemas(tmp_path, old):
    times = "ClusterCommAnalyzerTime" if old else "ClusterCommunicationTime"
    links = "ClusterCommAnalyzerMatrix" if old else "ClusterCommunicationMatrix"
    groups = "CommunicationGroup" if old else "CommunicationGroupMapping"
    with sqlite3.connect(tmp_path / "cluster_analysis.db") as db:
        db.executescript(
            f"""
            CREATE TABLE {times} (step TEXT, rank_id INTEGER, hccl_op_name TEXT, group_name TEXT,
                start_timestamp NUMERIC, {"elapse_time" if old else "elapsed_time"} NUMERIC, transit_time NUMERIC,
                wait_time NUMERIC, synchronization_time NUMERIC, idle_time NUMERIC);
            CREATE TABLE {links} (step TEXT, hccl_op_name TEXT, group_name TEXT, src_rank TEXT, dst_rank TEXT,
                transit_size NUMERIC, transit_time NUMERIC, bandwidth NUMERIC, transport_type TEXT, op_name TEXT);
            CREATE TABLE {groups} (type TEXT, rank_set TEXT, group_name TEXT, group_id TEXT, pg_name TEXT);
            CREATE TABLE ClusterStepTraceTime (step TEXT, type TEXT, "index" TEXT, computing NUMERIC,
                communication_not_overlapped NUMERIC, overlapped NUMERIC, communication NUMERIC, free NUMERIC,
                stage NUMERIC, bubble NUMERIC, preparing NUMERIC, pp_index INTEGER);
            INSERT INTO {times} VALUES ('step5', 0, 'hcom_allReduce__1_0_1', '77', 0, 5.0, 0.1, 1, 1, 0);
            INSERT INTO {times} VALUES ('step5', 1, 'hcom_allReduce__1_0_1', '77', 0, 2.0, 0.1, 1, 1, 0);
            INSERT INTO {times} VALUES ('step5', 0, 'Total Op Info', '77', 0, 5.0, 0.1, 1, 1, 0);
            INSERT INTO {links} VALUES ('step5', 'allreduce-total', '77', '0', '1', 30, 2, 15, 'HCCS', '');
            INSERT INTO {groups} VALUES ('collective', '(0, 1)', '77', '77', 'tp');
            INSERT INTO ClusterStepTraceTime VALUES ('5', 'rank', '0', 400, 900, 100, 1000, 8, 1308, 0, 1, 1);
            INSERT INTO ClusterStepTraceTime VALUES ('5', 'stage', '(0, 1)', 400, 900, 100, 1000, 8, 1308, 0, 1, 1);
            """
        )
    db.close()
    first, second = read_cluster_output(tmp_path)
    assert [len(trace.collectives) for trace in (first, second)] == [1, 1]
    assert first.collectives[0].duration_ns == 5_000_000
    assert first.collectives[0].group.ranks == (0, 1)
    assert (first.stage, lanes_of(first).step) == (1, 5)
    assert [load.num_bytes for load in first.links] == [30e6]
