"""Numbers that cannot be, nesting without end, links to nowhere: skipped and counted, or refused in a sentence."""

from __future__ import annotations

import errno
import gzip
import json
import os
import resource
import warnings

import pytest

from headrace.errors import FormatError
from headrace.traces import analyze, to_document
from headrace.traces.ascend_cluster import read_cluster_output
from headrace.traces.ascend_text import read_ascend_text
from headrace.traces.discover import discover
from headrace.traces.distributed_info import MAX_RANKS
from headrace.traces.kineto import read_kineto
from headrace.traces.records import read_records
from headrace.traces.training_log import read_training_log

from .ascend_files import Profile, write_step_trace, write_text
from .kineto_files import envelope, gloo, launched, nccl, step, write, x

DEEP = "[" * 5000 + "]" * 5000
HUGE = {"1e300": "1e300", "400 digits": "1" + "0" * 400, "1e999": "1e999", "2**63": str(1 << 63), "text": '"inf"'}


@pytest.fixture(autouse=True)
def _warnings_are_failures():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def little_memory():
    """A GiB more than now: a list of everything a file claims ends in a MemoryError, not with the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def job_of(folder, world_size):
    """Two ranks of it; their collective kernel takes in the whole world and does not list it."""
    for rank in range(2):
        kernel = nccl(10, 5, correlation=2)
        kernel["args"] |= {"Group size": world_size, "Process Group Ranks": ""}
        call = x("cuda_runtime", "launch", 2, 1, correlation=2)
        events = [step(1, 0, 50), *launched(1, 1, "kernel", "gemm", 3, 5), call, kernel]
        head = envelope(rank, 2)
        head["distributedInfo"] |= {"world_size": world_size, "pg_config": []}
        write(folder / f"rank_{rank}.json", events, head)
    return folder


@pytest.mark.usefixtures("little_memory")
def test_a_world_of_a_million_million_ranks_is_not_believed(tmp_path):
    document = to_document(analyze([job_of(tmp_path, 10**12)]))
    assert document["ranks"] == [0, 1]
    assert document["world_size"] is None
    assert any("1,000,000,000,000 ranks is not believed" in note for note in document["notes"])


@pytest.mark.usefixtures("little_memory")
def test_the_largest_world_costs_a_few_names_of_missing_ranks(tmp_path):
    analysis = analyze([job_of(tmp_path, MAX_RANKS)])
    assert analysis.world_size == MAX_RANKS
    assert any(f"2 of {MAX_RANKS} ranks were traced; missing: 2, 3, 4" in note for note in analysis.notes)


def test_a_rank_beyond_any_job_is_no_rank(tmp_path):
    head = envelope(10**12, 2, [[0, 10**12]])
    trace = read_kineto(write(tmp_path / "t.json", [step(1, 0, 50), *launched(1, 1, "kernel", "gemm", 3, 5)], head))
    assert (trace.rank, trace.groups) == (None, ())


def put(path, raw):
    """Write the JSON text `raw` where the file says "HERE"."""
    text = path.read_text()
    assert text.count('"HERE"') == 1
    path.write_text(text.replace('"HERE"', raw))
    return path


def good_events():
    return [step(1, 0, 100), *launched(1, 1, "kernel", "gemm", 10, 5), *launched(2, 2, "gpu_memcpy", "copy", 20, 2)]


def test_endless_nesting_in_an_event_is_a_broken_event(tmp_path):
    bad = x("kernel", "bad", 30, 5, anything="HERE")
    trace = read_kineto(put(write(tmp_path / "rank_0.json", [*good_events(), bad]), DEEP))
    assert trace.skipped_events == 1
    assert trace.lanes[0].computing_ns == 5_000


def test_a_batch_taken_apart_keeps_its_odd_events_too(tmp_path):
    """Event by event some fit the narrow classes and some only the general one."""
    odd = x("Kernel", "relu", 30, 5), x("kernel", "gemm", 50, "5.0"), x("kernel", "gemm", 60, -7)
    bad = x("kernel", "bad", 70, 5, anything="HERE")
    trace = read_kineto(put(write(tmp_path / "rank_0.json", [*good_events(), *odd, bad]), DEEP))
    assert (trace.lanes[0].computing_ns, trace.skipped_events) == (15_000, 2)


@pytest.mark.parametrize("value", [DEEP, json.dumps(DEEP)], ids=["nested", "nested in a text"])
def test_endless_nesting_in_the_envelope_is_no_traceback(tmp_path, value):
    for rank in range(2):
        write(tmp_path / f"rank_{rank}.json", good_events(), envelope(rank) | {"distributedInfo": "HERE"})
        put(tmp_path / f"rank_{rank}.json", value)
    assert to_document(analyze([tmp_path]))["ranks"] == [0, 1]


def test_endless_nesting_in_ascends_files(tmp_path):
    output = write_text(tmp_path / "r", Profile()) / "ASCEND_PROFILER_OUTPUT"
    view = output / "trace_view.json"
    whole = read_ascend_text(tmp_path / "r")
    view.write_text(view.read_text()[:-1] + ', {"ph": "X", "name": "bad", "args": "HERE"}]')
    trace = read_ascend_text(put(view, DEEP).parent.parent)
    assert (trace.skipped_events, trace.lanes) == (1, whole.lanes)
    (output / "communication.json").write_text('{"step1": ' + DEEP + "}")
    with pytest.raises(FormatError, match=r"communication\.json is broken"):
        read_ascend_text(tmp_path / "r")


def test_endless_nesting_in_records_and_logs(tmp_path):
    records = tmp_path / "rank0.jsonl"
    records.write_text('{"kind":"run","run":"r","rank":0,"world_size":1,"version":1,"x":' + DEEP + "}\n")
    with pytest.raises(FormatError, match="is not the description of a run"):
        read_records(records)
    log = tmp_path / "log.json"
    log.write_text('{"time info": ' + DEEP + "}")
    with pytest.raises(FormatError, match="without a single step time"):
        read_training_log(log)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("field", ["ts", "dur"])
@pytest.mark.parametrize("value", [*HUGE, "negative"])
def test_times_that_cannot_be_are_broken_events(tmp_path, value, field, packed):
    raw = HUGE.get(value, "-1" if field == "dur" else str(-(1 << 60)))
    bad = [x("kernel", "gemm", 30, 5), x("gpu_memset", "fill", 40, 1), step(2, 100, 50)]
    whole = read_kineto(write(tmp_path / "rank_1.json", good_events()))
    for place, event in enumerate(bad):
        event[field] = "HERE"
        path = put(write(tmp_path / f"rank_{place}.json", [*good_events(), event]), raw)
        if packed:
            path.write_bytes(gzip.compress(path.read_bytes()))
        trace = read_kineto(path)
        assert trace.skipped_events == 1
        assert any("1 broken events" in note for note in trace.notes)
        assert (trace.lanes, trace.launch_delay) == (whole.lanes, whole.launch_delay)


@pytest.mark.parametrize("value", [*HUGE, "negative"])
def test_a_cpu_jobs_times_that_cannot_be(tmp_path, value):
    good = [step(1, 0, 100), x("cpu_op", "aten::mm", 10, 20), gloo("all_reduce", 40, 10)]
    whole = read_kineto(write(tmp_path / "whole.json", good))
    bad = x("cpu_op", "aten::mm", 60, 0)
    bad["dur"] = "HERE"
    trace = read_kineto(put(write(tmp_path / "rank_0.json", [*good, bad]), HUGE.get(value, "-1")))
    assert trace.skipped_events == 1
    assert (trace.lanes, trace.collectives) == (whole.lanes, whole.collectives)


@pytest.mark.parametrize("value", HUGE)
def test_a_call_at_no_time_and_numbers_in_arguments(tmp_path, value):
    call = x("cuda_runtime", "launch", 1, 1, correlation=9)
    call["ts"] = "HERE"
    assert read_kineto(put(write(tmp_path / "a.json", [*good_events(), call]), HUGE[value])).skipped_events == 1
    for name in ("correlation", "In msg nelems", "Seq"):
        kernel = nccl(30, 5, correlation=3)
        kernel["args"][name] = "HERE"
        trace = read_kineto(put(write(tmp_path / "b.json", [*good_events(), kernel]), HUGE[value]))
        assert trace.lanes[0].communication_ns == 5_000  # the event has its times: what else it says is unknown


def test_a_step_number_beyond_int64_marks_no_step(tmp_path):
    trace = read_kineto(write(tmp_path / "rank_0.json", [*good_events(), step(10**30, 200, 50)]))
    assert [lanes.step for lanes in trace.lanes] == [1]


@pytest.mark.parametrize("value", [*HUGE, "negative"])
def test_ascend_view_times_that_cannot_be(tmp_path, value):
    folder = write_text(tmp_path / "r", Profile())
    whole = read_ascend_text(folder)
    view = folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json"
    events = json.loads(view.read_text())
    matrix = next(event for event in events if event["name"] == "MatMul")
    view.write_text(json.dumps([*events, matrix | {"dur": "HERE"}]))
    trace = read_ascend_text(put(view, HUGE.get(value, "-1")).parent.parent)
    assert trace.skipped_events == 1
    assert trace.lanes == whole.lanes


def test_an_ascend_event_with_odd_arguments_costs_the_others_nothing(tmp_path):
    folder = write_text(tmp_path / "r", Profile())
    whole = read_ascend_text(folder)
    view = folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json"
    view.write_text(json.dumps([*json.loads(view.read_text()), {"ph": "X", "name": "odd", "args": [1, 2]}]))
    assert read_ascend_text(folder).lanes == whole.lanes


ROW = [50, 400.0, 900.0, 100.0, 1000.0, 8.0, 1308.0, 0, 900.0, 0]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e300", "abc", ""])
def test_a_line_of_the_step_table_without_times_is_skipped_and_counted(tmp_path, value):
    output = write_text(tmp_path / "r", Profile(), view=False) / "ASCEND_PROFILER_OUTPUT"
    write_step_trace(output / "step_trace_time.csv", [ROW, [51, value, *ROW[2:]], [52, *ROW[1:5], value, *ROW[6:]]])
    trace = read_ascend_text(tmp_path / "r")
    assert [lanes.step for lanes in trace.lanes] == [50]
    assert trace.skipped_events == 2
    assert any("broken lines of the step table" in note for note in trace.notes)


def test_a_broken_line_of_the_merged_step_table_is_counted_once(tmp_path):
    rows = [[50, "rank", rank, *ROW[1:]] for rank in ("0", "1")] + [[51, "rank", "1", "inf", *ROW[2:]]]
    path = write_step_trace(tmp_path / "cluster_step_trace_time.csv", rows)
    path.write_text(path.read_text().replace("Step,Computing", "Step,Type,Index,Computing"))
    traces = read_cluster_output(tmp_path)
    assert [len(trace.lanes) for trace in traces] == [1, 1]
    assert sum(trace.skipped_events for trace in traces) == 1


@pytest.mark.parametrize("value", ["inf", "nan", "1e300"])
def test_an_operation_table_names_the_line_whose_times_cannot_be(tmp_path, value):
    path = tmp_path / "ops.csv"
    path.write_text(f"step,rank,stage,optype,start_ts,duration\n0,0,0,forward-compute,0,1\n0,0,0,x,0,{value}\n")
    with pytest.raises(FormatError, match=r"ops\.csv:3"):
        analyze([path])


@pytest.mark.parametrize("times", ['["inf"]', "[" + "1" * 400 + "]", "[null]", '["a"]', "[1e300]"])
def test_a_log_whose_step_times_cannot_be_is_refused(tmp_path, times):
    path = tmp_path / "log.json"
    path.write_text(f'{{"time info": {times}}}')
    with pytest.raises(FormatError, match="not what training logs are"):
        analyze([path])


def test_links_that_lead_to_themselves_or_back_up_are_passed_over(tmp_path):
    write(tmp_path / "rank_0.json", good_events())
    (tmp_path / "l").symlink_to("l")
    (tmp_path / "m.json").symlink_to("m.json")
    (tmp_path / "sub").mkdir()
    for name in ("up", "again"):
        (tmp_path / "sub" / name).symlink_to("..")
    found = discover([tmp_path])
    assert [entry.path.name for entry in found.inputs] == ["rank_0.json"]
    (note,) = found.notes
    assert note.startswith("passed over, because they cannot be looked at (2)")
    assert os.strerror(errno.ELOOP) in note


def test_an_output_folder_with_nothing_in_it_holds_no_trace(tmp_path):
    (tmp_path / "run" / "ASCEND_PROFILER_OUTPUT").mkdir(parents=True)
    with pytest.raises(FormatError, match="holds no trace"):
        discover([tmp_path])
