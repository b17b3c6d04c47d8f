"""Kineto traces in all their dialects: clocks, vendors, missing pieces; lanes against hand-made timelines."""

from __future__ import annotations

import json

import pytest

from headrace.traces.kineto import peek_rank, read_kineto

from .kineto_files import MAIN, WORKER, envelope, gloo, launched, nccl, step, write, x


def only_step(trace):
    (lanes,) = trace.lanes
    return lanes


def test_overlap_counts_each_moment_once(tmp_path):
    # communication [0, 10), kernels [2, 4) and [3, 8): 6 of 10 hidden (HolisticTraceAnalysis#56)
    events = [
        step(1, 0, 20),
        *launched(1, 1, "kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)", 100, 10),
        *launched(2, 2, "kernel", "gemm_a", 102, 2),
        *launched(3, 3, "kernel", "relu", 103, 5),
    ]
    lanes = only_step(read_kineto(write(tmp_path / "t.json", events)))
    assert (lanes.communication_ns, lanes.overlapped_ns, lanes.computing_ns) == (10_000, 6_000, 6_000)
    assert (lanes.e2e_ns, lanes.free_ns, lanes.matrix_ns) == (10_000, 0, 2_000)


def test_a_kernel_belongs_to_the_step_that_launched_it_not_to_the_one_it_runs_in(tmp_path):
    events = [
        step(7, 0, 10),
        step(8, 10, 10),
        *launched(1, 2, "kernel", "gemm", 5, 3),
        *launched(2, 9, "kernel", "gemm", 15, 4),  # launched in step 7, runs in step 8
        *launched(3, 12, "kernel", "gemm", 30, 2),
    ]
    trace = read_kineto(write(tmp_path / "t.json", events))
    assert [(lanes.step, lanes.computing_ns, lanes.e2e_ns) for lanes in trace.lanes] == [
        (7, 7_000, 14_000),
        (8, 2_000, 2_000),
    ]


def test_idle_time_is_split_by_who_was_waited_for(tmp_path):
    events = [
        step(1, 0, 100),
        x("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 12, 6),
        *launched(1, 1, "kernel", "gemm", 5, 5),  # device busy [5, 10)
        *launched(2, 30, "kernel", "gemm", 36, 4),  # idle [10, 36): host until 30, 6 of it data; then kernel wait
        *launched(3, 31, "gpu_memcpy", "Memcpy HtoD", 44, 2),  # idle [40, 44): all kernel wait
        x("kernel", "gemm", 50, 1),  # idle [46, 50): nobody knows
    ]
    events[-1]["args"]["correlation"] = 99
    lanes = only_step(read_kineto(write(tmp_path / "t.json", events)))
    assert lanes.data_ns == 6_000
    assert lanes.host_launch_ns == 14_000
    assert lanes.kernel_wait_ns == 6_000 + 4_000
    assert lanes.unknown_ns == 4_000
    assert lanes.exposed_copies_ns == 2_000
    assert lanes.free_ns == lanes.idle_ns + 2_000
    assert lanes.idle_ns == lanes.data_ns + lanes.host_launch_ns + lanes.kernel_wait_ns + lanes.unknown_ns


def test_launch_delay_is_call_to_start(tmp_path):
    events = [step(1, 0, 100)]
    for number in range(10):
        events += launched(number, 10 * number, "kernel", "gemm", 10 * number + 1 + number, 1)
    delay = read_kineto(write(tmp_path / "t.json", events)).launch_delay
    assert (delay.num_launches, delay.p50_us, delay.max_us) == (10, 5.5, 10.0)


CLOCKS = {
    "integers since the epoch": (1_661_203_462_598_738, {"baseTimeNanoseconds": None}),
    "three decimals after the base": (5_141_030_418_894.611, {}),
    "19 digits in one number": ("1661203462598738.123", {"baseTimeNanoseconds": None}),
    "text": ('"1661203462598738.123"', {"baseTimeNanoseconds": None}),
}


@pytest.mark.parametrize("clock", list(CLOCKS))
def test_no_nanosecond_is_lost_in_any_time_stamp_convention(tmp_path, clock):
    origin, extra = CLOCKS[clock]
    whole, _, decimals = str(origin).strip('"').partition(".")

    def stamp(offset_ns):
        total = int(whole) * 1000 + int((decimals or "0").ljust(3, "0")) + offset_ns
        text = f"{total // 1000}.{total % 1000:03d}"
        if "integers" in clock:
            return str(total // 1000)
        return f'"{text}"' if clock == "text" else text

    head = {key: value for key, value in (envelope() | extra).items() if value is not None}
    unit = 1000 if "integers" in clock else 1
    events = [
        ("user_annotation", "ProfilerStep#1", 0, 50_000, {}),
        ("cuda_runtime", "cudaLaunchKernel", 1_000, 2_000, {"correlation": 1}),
        ("kernel", "gemm", 7 * unit + 3_000, 5_000, {"correlation": 1}),
        ("kernel", "relu", 14 * unit + 9_000, 5_000, {"correlation": 1}),
    ]
    lines = [
        f'{{"ph": "X", "cat": "{cat}", "name": "{name}", "pid": 1, "tid": 1, "ts": {stamp(at)}, '
        f'"dur": {dur / 1000}, "args": {json.dumps(args)}}}'
        for cat, name, at, dur, args in events
    ]
    path = tmp_path / "rank_0.json"
    path.write_text(json.dumps(head)[:-1] + ', "traceEvents": [' + ",\n".join(lines) + "]}")
    lanes = only_step(read_kineto(path))
    assert lanes.e2e_ns == (14 * unit + 9_000 + 5_000) - (7 * unit + 3_000)
    assert lanes.host_launch_ns == 0
    assert lanes.computing_ns == 10_000


COMMUNICATION_KERNELS = [
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",  # HolisticTraceAnalysis#360
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
    "rcclGenericKernel<1, false>(ncclDevComm*)",
    "mscclpp_allreduce6(int)",
    "oneccl_allreduce_fp32",  # torch-xpu-ops#5384: no metadata
    "hcclAllReduce",
]


@pytest.mark.parametrize("name", COMMUNICATION_KERNELS)
def test_collective_kernels_of_every_vendor_are_communication(tmp_path, name):
    events = [step(1, 0, 50), *launched(1, 1, "kernel", name, 10, 5), *launched(2, 2, "kernel", "gemm", 20, 5)]
    lanes = only_step(read_kineto(write(tmp_path / "t.json", events)))
    assert (lanes.communication_ns, lanes.computing_ns) == (5_000, 5_000)


def test_a_kernel_with_collective_metadata_is_communication_whatever_its_name(tmp_path):
    kernel = nccl(10, 5, correlation=1)
    kernel["name"] = "my_fused_thing"
    events = [step(1, 0, 50), x("cuda_runtime", "launch", 1, 1, correlation=1), kernel]
    assert only_step(read_kineto(write(tmp_path / "t.json", events))).communication_ns == 5_000


@pytest.mark.parametrize("call", ["hip_runtime", "xpu_runtime", "privateuse1_runtime", "cuda_driver", "Runtime"])
@pytest.mark.parametrize("kernel", ["kernel", "Kernel"])
def test_other_accelerators_name_their_categories_differently(tmp_path, call, kernel):
    events = [step(1, 0, 50), *launched(1, 1, kernel, "gemm", 10, 5)]
    events[1]["cat"] = call
    trace = read_kineto(write(tmp_path / "t.json", events))
    assert only_step(trace).computing_ns == 5_000
    assert trace.launch_delay.max_us == 9.0


def test_collective_metadata_is_read(tmp_path):
    ranks = list(range(64))
    cut = "[0, 1, 2, 3, ..., 63]"  # torch cuts the list after 30 ranks
    kernel = nccl(10, 5, correlation=1, kind="_allgather_base", n=100, seq=17)
    kernel["args"] |= {"Process Group Ranks": cut, "Out msg nelems": 6400, "Group size": 64, "Process Group Name": "1"}
    events = [step(3, 0, 50), x("cuda_runtime", "launch", 1, 1, correlation=1), kernel]
    head = envelope(5, 128, [list(range(128)), ranks])
    (collective,) = read_kineto(write(tmp_path / "t.json", events, head)).collectives
    assert collective.group.ranks == tuple(ranks)
    assert (collective.kind, collective.sequence, collective.step) == ("all_gather", 17, 3)
    assert collective.num_bytes == 6400 * 4


INFOS = {
    "as an object": lambda info: info,
    "as a string": json.dumps,
    "ranks as a string": lambda info: info | {"pg_config": [{"pg_name": "0", "ranks": "[0, 1]"}]},
    "rank as a string": lambda info: info | {"rank": "1"},
    "old uid": lambda info: info | {"pg_config": [{"uid": "7", "ranks": [0, 1]}]},
}


@pytest.mark.parametrize("form", list(INFOS))
def test_distributed_info_in_all_its_forms(tmp_path, form):
    head = envelope(1, 2)
    head["distributedInfo"] = INFOS[form](head["distributedInfo"])
    path = write(tmp_path / "some.json", [step(1, 0, 10), *launched(1, 1, "kernel", "gemm", 2, 2)], head)
    trace = read_kineto(path)
    assert (trace.rank, trace.world_size) == (1, 2)
    assert trace.groups[0].ranks == (0, 1)
    assert peek_rank(path) == (1, 2)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank_3.json", 3),
        ("rank-34.Jul_15.pt.trace.json", 34),
        ("myjob_rank12.json", 12),
        ("node_rank0.json", None),
        ("tp-rank3.json", None),
        ("trace.json", None),
        ("prank_7.json", None),
        ("rank_not_found.json", None),
    ],
)
def test_the_name_tells_the_rank_when_the_trace_does_not(tmp_path, name, rank):
    path = write(tmp_path / name, [step(1, 0, 10), *launched(1, 1, "kernel", "gemm", 2, 2)], {"schemaVersion": 1})
    trace = read_kineto(path)
    assert trace.rank == rank
    assert any("does not say its rank" in note for note in trace.notes) == (rank is None)


def test_no_communication_kernels_is_said_not_counted_as_zero(tmp_path):
    # pytorch#60084
    events = [step(1, 0, 10), *launched(1, 1, "kernel", "gemm", 2, 2)]
    trace = read_kineto(write(tmp_path / "t.json", events, envelope(0, 8)))
    lanes = only_step(trace)
    assert (lanes.communication_ns, lanes.not_overlapped_ns, lanes.overlapped_ns) == (None, None, None)
    assert any("no communication kernels" in note for note in trace.notes)
    alone = only_step(read_kineto(write(tmp_path / "u.json", events, envelope(0, 1))))
    assert alone.communication_ns == 0


def test_a_gpu_job_profiled_on_the_cpu_only_gets_no_breakdown(tmp_path):
    events = [step(1, 0, 10), x("cpu_op", "aten::mm", 1, 5), x("user_annotation", "nccl:all_reduce", 6, 1)]
    trace = read_kineto(write(tmp_path / "t.json", events))
    assert trace.lanes == ()
    assert any("no device events" in note for note in trace.notes)


def test_a_cpu_job_computes_in_its_operators_and_communicates_in_gloo(tmp_path):
    events = [
        step(1, 0, 100),
        x("cpu_op", "aten::mm", 10, 20),
        x("cpu_op", "aten::add", 15, 2),  # inside: no second count
        x("cpu_op", "c10d::allreduce_", 40, 30),  # waits for gloo: not computing
        x("cpu_op", "aten::view", 45, 5),  # inside it: not either
        x("cpu_op", "aten::copy_", 50, 5, tid=WORKER),  # another thread: not either
        gloo("all_reduce", 25, 40),
        x("user_annotation", "data", 80, 10),
    ]
    trace = read_kineto(write(tmp_path / "rank_0.json", events))
    lanes = only_step(trace)
    assert trace.device == "cpu"
    assert (lanes.computing_ns, lanes.communication_ns, lanes.overlapped_ns) == (20_000, 40_000, 5_000)
    assert (lanes.e2e_ns, lanes.free_ns, lanes.data_ns) == (100_000, 45_000, 10_000)
    assert lanes.matrix_ns is None


def test_operators_are_found_in_a_gzip_too_where_the_tail_cannot_be_looked_at(tmp_path):
    events = [step(1, 0, 100), x("cpu_op", "aten::mm", 10, 20)]
    assert only_step(read_kineto(write(tmp_path / "rank_0.json.gz", events))).computing_ns == 20_000
    device = [*events, *launched(1, 1, "kernel", "gemm", 30, 7)]
    assert only_step(read_kineto(write(tmp_path / "rank_1.json.gz", device))).computing_ns == 7_000


def test_without_step_marks_the_whole_trace_is_one_unnumbered_step(tmp_path):
    trace = read_kineto(write(tmp_path / "t.json", launched(1, 1, "kernel", "gemm", 2, 2)))
    assert only_step(trace).step is None
    assert any("no step marks" in note for note in trace.notes)


def test_a_pipeline_receive_is_a_bubble(tmp_path):
    events = [
        step(1, 0, 100),
        x("cuda_runtime", "launch", 1, 1, correlation=1),
        nccl(10, 8, correlation=1, kind="recv"),
        *launched(2, 2, "kernel", "gemm", 15, 10),
    ]
    lanes = only_step(read_kineto(write(tmp_path / "t.json", events)))
    assert (lanes.bubble_ns, lanes.exposed_bubble_ns) == (8_000, 5_000)


def test_odd_events_do_not_stop_the_rest(tmp_path):
    events = [
        step(1, 0, 100),
        {"ph": "X", "cat": "kernel", "name": "no times"},
        {"ph": "X", "cat": "kernel", "name": "odd args", "ts": 20, "dur": 3, "args": [1, 2]},
        {"ph": "X", "cat": "kernel", "name": "odd correlation", "ts": 25, "dur": 3, "args": {"correlation": "x"}},
        {"ph": "B", "cat": "cpu_op", "name": "begins only", "ts": 1, "tid": "a string"},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        *launched(1, 1, "kernel", "gemm", 10, 5),
    ]
    trace = read_kineto(write(tmp_path / "t.json", events))
    assert only_step(trace).computing_ns == 11_000
    assert trace.num_events == len(events)
    assert trace.skipped_events == 0


def test_the_main_thread_is_the_one_with_the_step_marks(tmp_path):
    events = [step(1, 0, 50), x("cpu_op", "a", 1, 5, tid=MAIN), x("cpu_op", "b", 1, 40, tid=WORKER)]
    assert only_step(read_kineto(write(tmp_path / "rank_0.json", events))).computing_ns == 5_000


def test_what_collectives_carry_is_read_before_their_window_is_overwritten(tmp_path):
    """A gzip is unpacked into one buffer, window by window; a range's arguments are decoded only where they matter."""
    count = 6000
    events = [step(1, 0, 20 * count + 10.0), *(gloo("all_reduce", 20.0 * n, 10, (n + 1,)) for n in range(count))]
    trace = read_kineto(write(tmp_path / "rank_0.json.gz", events))
    assert [collective.in_elements for collective in trace.collectives] == list(range(1, count + 1))
