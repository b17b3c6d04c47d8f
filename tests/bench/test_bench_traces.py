"""The generated traces are what they claim, and the bench around them gives a whole record."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from headrace.bench.generated_trace import TraceShape, write_gpu_trace
from headrace.bench.traces import _summarise, run
from headrace.errors import ConfigError
from headrace.traces import analyze, to_document

SMALL = TraceShape(num_steps=4, launches_per_step=150, collective_every=50)


def test_a_generated_trace_has_the_mix_of_real_ones(tmp_path):
    path = tmp_path / "rank0.json"
    count = write_gpu_trace(path, shape=SMALL)
    events = json.loads(path.read_text())["traceEvents"]
    assert len(events) == count
    kinds = Counter(event.get("cat") for event in events)
    device = kinds["kernel"] + kinds["gpu_memcpy"]
    assert 3.5 < kinds["cpu_op"] / device < 4.5
    assert 2.1 < kinds["cuda_runtime"] / device < 2.6
    assert 3.0 < (kinds["ac2g"] + kinds["fwdbwd"]) / device < 4.0
    again = tmp_path / "again.json"
    write_gpu_trace(again, shape=SMALL)
    assert again.read_text() == path.read_text().replace("rank0.json", "again.json")


@pytest.mark.parametrize("numbered", [True, False])
def test_a_late_gpu_rank_is_found_through_the_files(tmp_path, numbered):
    """Four GPU ranks; rank 2 comes 2 ms late to every all-reduce and the others wait for it."""
    for rank in range(4):
        shape = TraceShape(
            num_steps=6,
            launches_per_step=150,
            collective_every=50,
            late_us=2000.0 * (rank == 2),
            waits_us=2000.0 * (rank != 2),
            has_sequence_numbers=numbered,
        )
        write_gpu_trace(tmp_path / f"rank{rank}.json", rank=rank, world_size=4, shape=shape)
    document = to_document(analyze([tmp_path]))
    assert (document["slow_rank"]["verdict"], document["slow_rank"]["rank"]) == ("host", 2)
    assert document["slow_rank"]["lateness_us_per_step"] == pytest.approx(6000, rel=0.01)
    assert document["unmatched_collectives"] == 0
    (group,) = document["collectives"]["groups"]
    assert (group["paired_by"], group["paired"]) == ("sequence" if numbered else "order", 18)
    for row in document["breakdown"]:
        parts = row["computing_us"] + row["communication_not_overlapped_us"] + row["free_us"]
        assert parts == pytest.approx(row["e2e_us"], abs=0.002)
        assert sum(row["free"].values()) == pytest.approx(row["free_us"], abs=0.003)


def test_the_record_is_whole_without_the_other_contender(tmp_path):
    record = run(num_rounds=1, shape=SMALL, large_bytes=2_000_000, folder=tmp_path)
    json.dumps(record)
    assert record["summary"]["hta_over_headrace"] is None
    assert "hta" in record["skipped"]
    assert record["summary"]["peak_over_file"] > 0
    assert [row["contender"] for row in record["rows"]] == ["headrace"]
    assert record["large"]["file_bytes"] == pytest.approx(2_000_000, rel=0.3)
    assert record["eight_ranks"]["eight_over_one"] > 0
    assert record["figures"][0]["reached"] is None
    assert list(tmp_path.iterdir()) == []


def test_the_ratio_has_an_interval_from_six_rounds_on():
    def runs(count):
        once = {"peak_bytes": 60, "answer": []}
        return {
            "headrace": [once | {"seconds": 0.1, "cpu_seconds": 0.1 + 0.001 * n} for n in range(count)],
            "hta": [once | {"seconds": 4.0 + 0.1 * n, "cpu_seconds": 3.5} for n in range(count)],
        }

    found = _summarise(runs(7), file_bytes=50)
    assert found["hta_over_headrace"] == pytest.approx(43)
    low, high = found["hta_over_headrace_95"]
    assert 40 <= low < 43 < high <= 46
    assert found["hta_over_headrace_cpu_95"][0] < found["hta_over_headrace_cpu"] == pytest.approx(3.5 / 0.103)
    assert found["peak_over_file"] == 1.2
    assert _summarise(runs(5), file_bytes=50)["hta_over_headrace_95"] == (None, None)


def test_an_interpreter_without_the_other_contender_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no HolisticTraceAnalysis"):
        run(hta_python=Path(sys.executable), num_rounds=1, shape=SMALL, large_bytes=0, folder=tmp_path)
    with pytest.raises(ConfigError, match="cannot be run: No such file"):
        run(hta_python=tmp_path / "missing", num_rounds=1, shape=SMALL, large_bytes=0, folder=tmp_path)
    with pytest.raises(ConfigError, match="num_rounds"):
        run(num_rounds=0)
