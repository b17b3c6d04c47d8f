"""Tables of operations, training logs and records: what has no timeline still answers what it can."""

from __future__ import annotations

import gzip
import json

import msgspec
import pytest

from headrace.errors import FormatError
from headrace.measure.record import ENCODER, RunFacts, StepRecord
from headrace.traces import analyze
from headrace.traces.op_table import is_op_table, read_op_table
from headrace.traces.records import is_records, read_records
from headrace.traces.training_log import is_training_log, read_training_log

HEADING = "step,rank,dp_rank,stage,optype,mb_id,start_ts,duration"


def op_rows(slow=None, *, steps=6, stages=2, replicas=3, factor=1.6, uneven=1.0):
    """Pipeline of `stages`, data parallel `replicas`; rank = 4 x (stage x replicas + replica), as TP 4 numbers them."""
    rows = []
    for step in range(steps):
        for stage in range(stages):
            for replica in range(replicas):
                rank = 4 * (stage * replicas + replica)
                busy = 1.0 * (factor if rank == slow else 1.0) * (uneven if stage == 1 else 1.0)
                rows += [
                    f"{step},{rank},{replica},{stage},params-all-gather,-1,0.0,0.1",
                    f"{step},{rank},{replica},{stage},forward-compute,0,0.1,{busy:.6f}",
                    f"{step},{rank},{replica},{stage},backward-recv,-1,{0.1 + busy:.6f},0.2",
                    f"{step},{rank},{replica},{stage},backward-compute,0,{0.3 + busy:.6f},{2 * busy:.6f}",
                    f"{step},{rank},{replica},{stage},gc,0,3.4,0.0",
                    f"{step},{rank},{replica},{stage},grads-reduce-scatter,-1,{0.3 + 3 * busy:.6f},0.3",
                ]
    return rows


def write_ops(path, rows):
    data = "\n".join([HEADING, *rows, ""]).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["ops.csv", "ops.csv.gz"])
def test_an_operation_table_gives_computing_per_step_and_stage(tmp_path, name):
    path = write_ops(tmp_path / name, op_rows())
    assert is_op_table(path)
    traces = read_op_table(path)
    assert [trace.rank for trace in traces] == [0, 4, 8, 12, 16, 20]
    assert [trace.stage for trace in traces] == [0, 0, 0, 1, 1, 1]
    lanes = traces[0].lanes[0]
    assert (lanes.computing_ns, lanes.bubble_ns, lanes.exposed_bubble_ns) == (3_000_000_000, 200_000_000, 200_000_000)
    assert lanes.e2e_ns == 3_600_000_000


def test_a_worker_that_computes_longer_than_its_stage_is_a_slow_card(tmp_path):
    found = analyze([write_ops(tmp_path / "ops.csv", op_rows(slow=16))]).slow_rank
    assert (found.verdict, found.rank, found.steps_late) == ("card", 16, 6)
    assert found.evidence["computing_over_median_of_stage"]["16"] == 1.6


def test_an_even_table_accuses_nobody_and_an_uneven_partition_is_told(tmp_path):
    assert analyze([write_ops(tmp_path / "even.csv", op_rows())]).slow_rank.verdict == "none"
    found = analyze([write_ops(tmp_path / "uneven.csv", op_rows(uneven=1.3))]).slow_rank
    assert (found.verdict, found.rank) == ("partition", None)


def test_a_wrong_line_is_named(tmp_path):
    path = write_ops(tmp_path / "ops.csv", [*op_rows(), "6,0,0,0,forward-compute,0,abc,1"])
    with pytest.raises(FormatError, match=r"ops\.csv:218"):
        read_op_table(path)
    with pytest.raises(FormatError, match="no rows"):
        read_op_table(write_ops(tmp_path / "empty.csv", []))


def baseline(times_ms, **extra):
    return {"lm loss": [1.0] * len(times_ms), "time info": times_ms} | extra


def test_a_log_leaves_its_warm_up_out(tmp_path):
    path = tmp_path / "baseline.json"
    memory = [{"rank": rank, "max allocated memory": 1000.0 + rank} for rank in range(4)]
    log = baseline([9000.0, 3000.0, 1000.0, 1010.0, 990.0, 1000.0], throughput=[1, 3, 60, 59, 61, 60])
    path.write_text(json.dumps(log | {"memo info": memory}))
    assert is_training_log(path)
    found = read_training_log(path)
    assert (found.num_steps, found.warm_up_steps, found.step_time_median_s) == (6, 2, 1.0)
    assert found.published_tflops_per_device == 60
    assert (found.num_devices, max(found.peak_memory_mb)) == (4, 1003.0)
    assert found.tokens_per_s(5000) == 5000
    assert found.tflops_per_device(4e12) == 1.0


def test_the_lines_megatron_prints_are_a_log(tmp_path):
    path = tmp_path / "train.log"
    lines = [
        f" [2026-01-01] iteration {n}/ 100 | consumed samples: {64 * n} | elapsed time per iteration (ms): {ms} | "
        f"throughput per GPU (TFLOP/s/GPU): {tflops} | learning rate: 1E-4 | global batch size:    64 | lm loss: 6.1"
        for n, ms, tflops in ((1, 13649.0, 16.6), (2, 5556.9, 66.4), (3, 5553.2, 66.7), (4, 5550.0, 66.8))
    ]
    path.write_text("starting\n" + "\n".join(lines) + "\nsaving\n")
    found = read_training_log(path)
    assert (found.num_steps, found.warm_up_steps, found.global_batch_size) == (4, 1, 64)
    assert found.step_time_median_s == pytest.approx(5.5532)
    assert found.num_devices is None
    assert found.tflops_per_device(1e12) is None


@pytest.mark.parametrize("content", ['{"time info": []}', '{"time info": 3}', "elapsed time per iteration (ms): none"])
def test_a_log_without_times_is_refused(tmp_path, content):
    path = tmp_path / "log.json"
    path.write_text(content)
    with pytest.raises(FormatError):
        read_training_log(path)


MS = 1_000_000


def write_records(folder, rank, *, late_ms=0, steps=8):
    facts = RunFacts(run="20260101-000000-abc", rank=rank, world_size=4, warmup_steps=1)
    lines = [facts]
    for step in range(steps):
        phases = {"data": 2 * MS, "forward": (30 + late_ms) * MS, "backward": 50 * MS, "optimizer": 5 * MS}
        phases |= {"post": 0, "communication": (45 - late_ms) * MS, "scheduling": 1 * MS, "other": 0}
        whole = sum(phases.values())
        lines.append(StepRecord(run=facts.run, rank=rank, step=step, warmup=step == 0, step_ns=whole, phases_ns=phases))
    path = folder / f"rank{rank:05d}.jsonl"
    path.write_bytes(b"".join(ENCODER.encode(line) + b"\n" for line in lines))
    return path


def test_records_become_lanes_without_their_warm_up(tmp_path):
    path = write_records(tmp_path, 2)
    assert is_records(path)
    trace = read_records(path)
    assert (trace.rank, trace.world_size, [lanes.step for lanes in trace.lanes]) == (2, 4, list(range(1, 8)))
    lanes = trace.lanes[0]
    assert (lanes.computing_ns, lanes.communication_ns, lanes.data_ns) == (85 * MS, 45 * MS, 2 * MS)
    assert lanes.free_ns == 3 * MS


def test_records_of_all_ranks_show_who_was_waited_for(tmp_path):
    for rank in range(4):
        write_records(tmp_path, rank, late_ms=40 * (rank == 1))
    analysis = analyze([tmp_path])
    assert (analysis.slow_rank.verdict, analysis.slow_rank.rank, analysis.slow_rank.sure) == ("card", 1, "high")
    assert all(offset.num_collectives == 0 for offset in analysis.offsets)  # records have no place on a time axis


def test_records_without_communication_accuse_nobody(tmp_path):
    path = write_records(tmp_path, 0)
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    for line in lines[1:]:
        line["phases_ns"]["communication"] = None
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    trace = read_records(path)
    assert trace.collectives == ()
    assert trace.lanes[0].communication_ns is None
    assert any("not seen live" in note for note in trace.notes)
