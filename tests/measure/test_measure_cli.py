"""The verbs: `headrace compare`, `headrace tune`, and the body of `headrace bench measure`."""

import json
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.tune import limited_memory
from headrace.errors import ConfigError, FormatError
from headrace.measure.record import RunFacts
from headrace.measure.run import Run
from headrace.measure.step import Step

from .fakes import FakeClock

FACTS = RunFacts(run="a", rank=0, world_size=1, device_name="cpu", dtype="float32")


def record(folder, facts, step_ms, steps=30):
    """A recorded run whose steps take about `step_ms`."""
    clock = FakeClock()
    run = Run(facts, step=Step(clock=clock), records=folder)
    for index in range(steps):
        with run.step.forward:
            clock.advance(ms=step_ms * (1 + 0.01 * (index % 3)))
        run.count(samples=4, tokens=400)
        run.end()
    run.close()
    return folder


def invoke(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_compare_says_better_and_writes_the_document(tmp_path):
    a = record(tmp_path / "a", FACTS, 20)
    b = record(tmp_path / "b", msgspec.structs.replace(FACTS, run="b", dtype="bfloat16"), 10)
    found = invoke("compare", a, b, "--json", tmp_path / "out.json")
    assert found.exit_code == 0, found.output
    assert "verdict: better (by tokens/s" in found.output
    assert "different: dtype: float32 and bfloat16" in found.output
    document = json.loads((tmp_path / "out.json").read_text())
    assert (document["version"], document["kind"], document["verdict"]) == (1, "compare", "better")
    tokens = next(one for one in document["metrics"] if one["name"] == "tokens/s")
    assert tokens["ratio"]["low"] <= 2.0 <= tokens["ratio"]["high"]
    assert document["linearity"] is None


def test_the_table_is_whole_at_80_columns(tmp_path, monkeypatch):
    """Large rates, long times and a drifting run: every ratio, interval and verdict is there to its last digit."""
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "b"
    clock = FakeClock()
    run = Run(msgspec.structs.replace(FACTS, run="b"), step=Step(clock=clock), records=folder)
    for index in range(60):
        with run.step.forward:
            clock.advance(ms=9000 * (1 + 0.3 * (index % 2)))
        with run.step.backward:
            clock.advance(ms=20 * 0.97**index)
        run.count(samples=40_000, tokens=900_000_000)
        run.end()
    run.close()
    a = Run(FACTS, step=Step(clock=clock), records=tmp_path / "a")
    for _ in range(60):
        with a.step.forward:
            clock.advance(ms=1)
        with a.step.backward:
            clock.advance(ms=20)
        a.count(samples=40_000, tokens=900_000_000)
        a.end()
    a.close()
    found = invoke("compare", tmp_path / "a", folder)
    assert "\u2026" not in found.output
    assert "..." not in found.output
    assert max(len(line) for line in found.output.splitlines()) <= 80
    (tokens,) = (line for line in found.output.splitlines() if line.startswith("tokens/s"))
    ratio, interval, verdict = tokens.split()[3:]
    low, high = interval.split("..")
    assert float(low) <= float(ratio) <= float(high)
    assert verdict == "worse"
    (backward,) = (line for line in found.output.splitlines() if line.startswith("backward  "))
    assert backward.split()[-2:] == ["cannot", "tell"]
    assert "backward: run B drifts" in found.output


def test_compare_says_what_differs_before_it_judges(tmp_path):
    a = record(tmp_path / "a", msgspec.structs.replace(FACTS, num_parameters=1000), 10)
    b = record(tmp_path / "b", msgspec.structs.replace(FACTS, run="b", num_parameters=5000), 20)
    found = invoke("compare", a, b)
    assert "different: num parameters: 1000 and 5000" in found.output
    assert "verdict: worse (by tokens/s; not the same work" in found.output


def test_compare_shows_linearity_between_sizes(tmp_path):
    a = record(tmp_path / "a", FACTS, 20)
    large = msgspec.structs.replace(FACTS, run="b", world_size=4, data_parallel_size=4)
    found = invoke("compare", a, record(tmp_path / "b", large, 22))
    assert "linearity 1 -> 4 devices: 0.909 of 4 times the throughput" in found.output.replace("\n", " ")


def test_compare_the_same_twice_cannot_tell(tmp_path):
    found = invoke("compare", *(record(tmp_path / run, msgspec.structs.replace(FACTS, run=run), 20) for run in "ab"))
    assert "verdict: cannot tell" in found.output


def test_compare_refuses_what_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="holds no records"):
        CliRunner().invoke(app, ["compare", str(tmp_path), str(tmp_path)], catch_exceptions=False)
    (tmp_path / "rank.jsonl").write_text("{}\n")
    with pytest.raises(FormatError):
        CliRunner().invoke(app, ["compare", str(tmp_path), str(tmp_path)], catch_exceptions=False)
    with pytest.raises(ConfigError, match="smallest-effect"):
        CliRunner().invoke(app, ["compare", "a", "b", "--smallest-effect", "5"], catch_exceptions=False)


def test_tune_finds_a_batch_within_the_memory_it_is_given(tmp_path):
    """The limit on the address space makes the CPU's allocator fail as a device's would."""
    pytest.importorskip("transformers")
    options = ["--seq-length", "32", "--upper", "64", "--multiple", "16", "--memory-gib", "0.3"]
    command = [sys.executable, "-c", "from headrace.cli import main; main()", "tune", *options]
    command += ["--json", str(tmp_path / "out.json")]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=one_thread)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "out.json").read_text())
    result = document["results"]["none"]
    failed = [one for one in result["tried"] if not one["fits"]]
    fitted = {one["batch_size"] for one in result["tried"] if one["fits"]}
    assert result["largest"] in fitted
    assert result["largest"] % 16 == 0
    assert result["largest"] == max(fitted) < min(one["batch_size"] for one in failed)
    assert "DefaultCPUAllocator" in failed[0]["reason"] or "Memory" in failed[0]["reason"]
    assert not result["reached_upper"]
    assert "largest" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recompute", "some"], "--recompute takes none, full"),
        (["--search", "random"], "--search is binary or sequential"),
        (["--model", "gpt"], "--model is llama or moe"),
        (["--device", "cuda", "--memory-gib", "1"], "--memory-gib limits the CPU"),
    ],
)
def test_tune_refuses_wrong_choices_before_it_works(arguments, words):
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(app, ["tune", *arguments], catch_exceptions=False)


def test_the_memory_limit_is_taken_off_again():
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    with limited_memory(2**30):
        assert resource.getrlimit(resource.RLIMIT_AS)[0] != before[0]
        with pytest.raises(MemoryError):
            bytearray(2**31)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    with limited_memory(None):
        assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_the_bench_counts_what_it_says():
    pytest.importorskip("transformers")
    from headrace.bench.measure import run

    found = run(num_rounds=7, num_warmup_rounds=1, spans_per_round=50, windows_per_round=1, log_every=2)
    assert set(found) == {"version", "isolates", "environment", "calls_per_step", "rows", "skipped", "summary"}
    assert json.loads(json.dumps(found))["summary"] == found["summary"]
    by_name = {(row["what"], row["contender"]): row for row in found["rows"]}
    loops = [
        (f"step of {model}, {clock} time", side)
        for model in ("2 layers", "48 layers")
        for clock in ("wall", "cpu")
        for side in ("plain", "measured")
    ]
    calls = [("call", name) for name in ("perf_counter_ns pair", "span", "end of a step")]
    cold = [("call behind a step", name) for name in ("nothing", "span", "count", "end of a step", "end of a window")]
    assert set(by_name) == {*loops, *calls, *cold}
    assert all(len(by_name[key]["values_us"]) == 7 for key in calls)
    assert all((len(by_name[key]["values_us"]), len(by_name[key]["warmup_us"])) == (14, 2) for key in loops)
    summary = found["summary"]
    assert 0 < summary["clock_pair_us"] < summary["span_us"] < summary["end_us"]
    for loop in ("", "many_modules_"):
        for name in ("excess_us", "loop_slowdown", "loop_slowdown_cpu", "loop_slowdown_mean"):
            low, high = summary[f"{loop}{name}_interval"]
            assert low <= summary[f"{loop}{name}"] <= high
    assert summary["many_modules"] > 300
    with pytest.raises(ConfigError):
        run(num_rounds=0)


def test_the_excess_weighs_reporting_steps_by_their_share_and_a_slow_minute_cancels():
    pytest.importorskip("transformers")
    from headrace.bench.measure import excess_figures

    plain = np.full((24, 10), 1000.0)
    plain[5:9] *= 3  # somebody else was there
    measured = plain + 10.0
    measured[:, -1] += 200.0
    measured[3, 4] += 50_000.0  # one preemption
    found = excess_figures(plain, measured, 4, "")
    assert found["excess_us"] == pytest.approx(10 + 200 / 10)
    assert found["excess_us_interval"] == pytest.approx([30, 30])
    assert found["loop_slowdown"] == pytest.approx(0.03)
    few = excess_figures(plain[:8], measured[:8], 4, "_cpu")
    assert few["excess_us_cpu"] == pytest.approx(30)
    assert few["excess_us_cpu_interval"] == [None, None]
