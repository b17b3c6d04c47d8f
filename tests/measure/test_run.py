"""A measured run on fake clocks: counts meet times, become records, lines and a summary, and nothing stops training."""

import json
import logging
from dataclasses import replace as dataclass_replace

import msgspec
import numpy as np
import pytest

from headrace.errors import ConfigError, FormatError
from headrace.measure.flops import ModelShape, step_flops, work_of
from headrace.measure.memory import DeviceMemory
from headrace.measure.record import VERSION, RunFacts, new_run_id, read_file, read_run
from headrace.measure.run import Run
from headrace.measure.slow_rank import RankWindow
from headrace.measure.step import Step

from .fakes import FakeClock, FakeDevice

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, gated=False, vocab=100)
FACTS = RunFacts(
    run="a", rank=0, world_size=4, data_parallel_size=2, tensor_parallel_size=2, shape=SHAPE, peak_flops=1e12,
    sequence_length=128, warmup_steps=1,
)  # fmt: skip


class Loop:
    """A training loop on a fake clock: 1 ms data, 3 ms forward, 5 ms backward, 1 ms optimizer per micro batch."""

    def __init__(self, facts=FACTS, **options):
        self.clock = FakeClock()
        self.run = Run(facts, step=Step(clock=self.clock), **options)

    def micro_batch(self, **counts):
        step = self.run.step
        for name, ms in (("data", 1), ("forward", 3), ("backward", 5), ("optimizer", 1)):
            with getattr(step, name):
                self.clock.advance(ms=ms)
        self.run.count(**counts)

    def train(self, steps, micro_batches=1, **counts):
        counts = counts or {"samples": 8, "tokens": 8 * 128}
        for _ in range(steps):
            for _ in range(micro_batches):
                self.micro_batch(**counts)
            self.run.end()
        return self


def test_throughput_counts_all_data_parallel_ranks_and_leaves_the_warm_up_out():
    summary = Loop().train(11).run.summary()
    assert (summary.first_step, summary.last_step, summary.num_steps) == (1, 10, 10)
    assert summary.throughput.samples_per_s == pytest.approx(2 * 8 / 0.010)
    assert summary.throughput.tokens_per_s_per_device == pytest.approx(2 * 8 * 128 / 0.010 / 4)


def test_accumulation_is_one_step_with_the_same_rate():
    accumulated = Loop().train(6, micro_batches=4).run.summary()
    assert accumulated.num_steps == 5
    assert accumulated.mean_step_s == pytest.approx(0.040)
    assert accumulated.throughput.tokens_per_s == Loop().train(6).run.summary().throughput.tokens_per_s


def test_operations_follow_the_true_lengths():
    whole = Loop().train(3, samples=1, tokens=128).run.summary()
    packed = Loop().train(3, samples=1, document_lengths=[64, 32, 32]).run.summary()
    expected = step_flops(SHAPE, work_of([64, 32, 32], attention="causal")).model
    assert packed.mfu.flops_per_s_per_device == pytest.approx(2 * expected / 0.010 / 4)
    assert packed.mfu.value < whole.mfu.value
    assert packed.throughput.tokens_per_s == whole.throughput.tokens_per_s


def test_padding_is_reported_beside_real_tokens():
    summary = Loop().train(3, samples=4, tokens=300, padded_tokens=512).run.summary()
    assert summary.throughput.padding_ratio == pytest.approx(1 - 300 / 512)
    assert summary.throughput.padded_tokens_per_s > summary.throughput.tokens_per_s
    full = Loop().train(3, samples=4, tokens=512, padded_tokens=512).run
    assert full.summary().throughput.padding_ratio == 0.0
    assert "padding 0.0%" in full.close()


def test_padding_that_was_not_given_is_not_zero():
    run = Loop().train(3, samples=4, tokens=300).run
    assert run.summary().throughput.padding_ratio is None
    assert "padding not given" in run.close()


def test_a_micro_batch_without_a_count_makes_the_step_unknown_not_smaller():
    loop = Loop(msgspec.structs.replace(FACTS, warmup_steps=0))
    loop.micro_batch(samples=8, tokens=100)
    loop.micro_batch(samples=8)
    loop.run.end()
    summary = loop.run.summary()
    assert summary.throughput.tokens_per_s is None
    assert summary.throughput.samples_per_s == pytest.approx(2 * 16 / 0.020)
    assert summary.mfu.value is None


@pytest.mark.parametrize(
    "nonsense",
    [
        {"samples": 1, "document_lengths": [-5]},
        {"samples": "many", "tokens": 5},
        {"samples": 1, "tokens": 5, "padded_tokens": -1},
        {"samples": 1, "tokens": float("nan")},
        {"samples": float("inf"), "tokens": 5},
        {"samples": 1, "document_lengths": 7},
    ],
)
def test_counts_that_make_no_sense_are_unknown_with_one_warning_and_training_goes_on(nonsense, caplog):
    loop = Loop()
    with caplog.at_level(logging.WARNING, "headrace.measure"):
        loop.train(1)
        for _ in range(2):  # the other micro batches of the step must not pass for the whole step
            loop.micro_batch(samples=8, tokens=1024)
            loop.micro_batch(**nonsense)
            loop.run.end()
        summary = loop.run.summary()
    assert len(caplog.records) == 1
    assert summary.num_steps == 2
    assert summary.throughput.tokens_per_s is summary.throughput.samples_per_s is summary.mfu.value is None


def test_arrays_of_narrow_integers_are_counted_without_overflow_and_may_be_used_again(tmp_path):
    loop = Loop(records=tmp_path)
    lengths = np.array([131_072, 100_000], np.int32)
    loop.run.count(samples=np.int64(1), tokens=lengths.sum(), document_lengths=lengths)
    lengths[:] = 0
    loop.run.end()
    loop.run.close()
    (step,) = read_run(tmp_path)[0].steps
    assert step.squared_lengths == 131_072**2 + 100_000**2
    assert step.tokens == 231_072


def test_evaluation_is_in_the_summary_and_not_in_the_rate():
    loop = Loop().train(2)
    with loop.run.step.evaluation:
        loop.clock.advance(ms=5000)
    loop.train(1)
    summary = loop.run.summary()
    assert summary.mean_step_s == pytest.approx(0.010)
    assert summary.excluded_s == {"evaluation": 5.0}


@pytest.mark.parametrize("log_every", [1, 10, 20])
def test_a_line_per_window_divides_by_the_steps_it_timed(log_every):
    lines, logged = [], []
    loop = Loop(
        log_every=log_every, print_line=lines.append, log_metrics=lambda found, step: logged.append((step, found))
    )
    loop.train(40)
    steps = [step for step, _ in logged]
    assert steps == [step for step in range(log_every - 1, 40, log_every) if step > 0]
    for _, found in logged:
        assert found["time_metrics/end_to_end(s)"] == pytest.approx(0.010)
        assert found["time_metrics/data_loading(%)"] == pytest.approx(10.0)
        assert found["throughput(tps)"] == pytest.approx(2 * 8 * 128 / 0.010 / 4)
        assert found["mfu(%)"] > 0
        assert "headrace/communication(s)" not in found, "what was not measured is not logged"
    assert lines[-1].startswith(
        "step 39 | 10.0 ms | 204,800 tokens/s | data 10% forward 30% backward 50% optimizer 10%"
    )
    assert "communication ?%" in lines[-1]


class FakeMemory:
    """A device's peaks, read and reset once per window."""

    def __init__(self):
        self.reads = 0

    def __call__(self):
        self.reads += 1
        return DeviceMemory(
            peak_allocated_bytes=3 * 2**30, peak_reserved_bytes=4 * 2**30, peak_active_bytes=None, alloc_retries=2,
            out_of_memory_errors=0, capacity_bytes=16 * 2**30,
        )  # fmt: skip


def test_memory_is_read_once_per_window_under_torchtitans_names():
    memory, logged, lines = FakeMemory(), [], []
    loop = Loop(read_device_memory=memory, log_metrics=lambda found, _: logged.append(found), print_line=lines.append)
    loop.train(30)
    assert memory.reads == 3
    assert logged[-1]["memory/max_reserved(GiB)"] == 4.0
    assert logged[-1]["memory/max_reserved(%)"] == 25.0
    assert logged[-1]["memory/max_active(GiB)"] == 3.0
    assert logged[-1]["memory/num_alloc_retries"] == 2
    assert "2 allocation retries" in lines[-1]


def test_records_are_one_line_per_step_with_raw_values(tmp_path):
    loop = Loop(records=tmp_path).train(12)
    loop.run.close()
    raw = [json.loads(line) for line in (tmp_path / "a" / "rank00000.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in raw] == ["run", *["step"] * 10, "window", *["step"] * 2, "window"]
    assert raw[0]["version"] == VERSION
    assert raw[1]["warmup"] is True
    assert raw[3] == {
        "kind": "step", "run": "a", "rank": 0, "step": 2, "step_ns": 10_000_000,
        "phases_ns": {"data": 1_000_000, "forward": 3_000_000, "backward": 5_000_000, "optimizer": 1_000_000,
                      "post": None, "communication": None, "scheduling": None, "other": 0},
        "samples": 8, "tokens": 1024, "squared_lengths": 8 * 128**2,
        "model_flops": step_flops(SHAPE, work_of([128] * 8, attention="causal")).model,
        "hardware_flops": step_flops(SHAPE, work_of([128] * 8, attention="causal")).hardware,
    }  # fmt: skip
    got = read_file(tmp_path / "a" / "rank00000.jsonl")
    assert got.facts == FACTS
    assert [step.step for step in got.steps] == list(range(12))
    assert not got.truncated


def test_on_a_device_records_come_later_and_none_is_missing(tmp_path):
    clock = FakeClock()
    device = FakeDevice(clock)
    run = Run(FACTS, step=Step(clock=clock, new_event=device.new_event), records=tmp_path)
    for index in range(8):
        with run.step.forward:
            device.launch(10)
        run.count(samples=index + 1, tokens=10)
        run.end()
        clock.advance(ms=9)
    run.close()
    (rank,) = read_run(tmp_path)
    assert [step.samples for step in rank.steps] == list(range(1, 9))
    assert {step.timeline for step in rank.steps} == {"device"}
    assert all("forward" in step.host_ns for step in rank.steps)


def test_everything_outside_may_fail_and_the_rest_goes_on(tmp_path, caplog):
    def broken(*_):
        raise OSError("disk full")

    loop = Loop(records=tmp_path, log_metrics=broken, print_line=broken, read_device_memory=broken, at_close=[broken])
    loop.run.writer.file.close()
    with caplog.at_level(logging.WARNING, "headrace.measure"):
        loop.train(40)
        text = loop.run.close()
    assert "39 steps" in text
    told = [record.getMessage().split(" failed")[0] for record in caplog.records]
    assert sorted(told) == [
        "cleaning up", "reading device memory", "the metrics logger", "the terminal line", "writing records"
    ]  # fmt: skip


def test_the_summary_says_every_gap_with_its_reason():
    text = Loop(msgspec.structs.replace(FACTS, peak_flops=None)).train(4).run.close()
    assert "mean 10.00 ms" in text
    assert "communication not seen: no span of this phase in this step" in text
    assert "scheduling    not seen: the host computes itself" in text
    assert "MFU           not known: the device's peak for this dtype is unknown: pass peak_flops" in text
    assert "no step was measured" in Loop().run.close()


def test_measured_memory_stands_beside_the_formula():
    text = Loop(read_device_memory=FakeMemory()).train(12).run.close()
    assert "peak allocated 3.00 GiB, reserved 4.00 GiB; peak resident" in text
    assert "by formula" in text
    assert "by formula" not in Loop(msgspec.structs.replace(FACTS, sequence_length=None)).train(4).run.close()


def test_training_efficiency_is_marked_as_our_definition():
    assert "not known: not seen: communication (our definition" in Loop().train(4).run.close()
    alone = msgspec.structs.replace(FACTS, world_size=1, data_parallel_size=1, tensor_parallel_size=1)
    assert "efficiency    90.0% (our definition" in Loop(alone).train(4).run.close()


def test_a_peak_that_cannot_be_is_flagged_in_the_line():
    lines = []
    Loop(msgspec.structs.replace(FACTS, peak_flops=1.0), print_line=lines.append).train(10)
    assert "(impossible)" in lines[-1]


class FakeGather:
    """Rows of rank 1 made from those of rank 0; they arrive one window later."""

    def __init__(self, extra_wait_s):
        self.extra_wait_s, self.sent, self.pending = extra_wait_s, 0, []

    def submit(self, row):
        self.sent += 1
        mine = RankWindow.from_row(row)
        other = dataclass_replace(mine, rank=1, wait_s=mine.wait_s + self.extra_wait_s)
        self.pending.append([row, other.row()])

    def ready(self):
        done, self.pending = self.pending[:-1], self.pending[-1:]
        return done


def test_the_slow_rank_is_named_in_line_log_and_records(tmp_path):
    lines, logged = [], []
    loop = Loop(
        gather=FakeGather(0.050), print_line=lines.append, log_metrics=lambda found, _: logged.append(found),
        records=tmp_path,
    )  # fmt: skip
    loop.run.step.observe("communication")
    loop.train(60)
    loop.run.close()
    assert loop.run.slow_rank.rank == 0
    assert "rank 0 is late" in lines[-1]
    assert logged[-1]["headrace/slow_rank"] == 0
    assert read_run(tmp_path)[0].windows[-1].slow_rank == loop.run.slow_rank


def test_a_gather_that_fails_is_left(caplog):
    gather = FakeGather(0.0)
    gather.submit = lambda row: (_ for _ in ()).throw(RuntimeError("Connection reset by peer"))
    loop = Loop(gather=gather)
    with caplog.at_level(logging.WARNING, "headrace.measure"):
        loop.train(40)
    assert loop.run.gather is None
    assert len(caplog.records) == 1


def test_closing_twice_and_leaving_by_an_exception_are_fine(tmp_path):
    loop = Loop(records=tmp_path).train(5)
    with pytest.raises(FloatingPointError), loop.run:
        raise FloatingPointError("nan in the loss")
    assert loop.run.close() == loop.run.close()
    assert len(read_run(tmp_path)[0].steps) == 5


def test_a_window_has_at_least_one_step():
    with pytest.raises(ConfigError, match="log_every"):
        Loop(log_every=0)


def test_a_restart_never_writes_into_the_records_of_the_run_before(tmp_path):
    assert new_run_id() != new_run_id()
    Loop(records=tmp_path).run.close()
    with pytest.raises(FileExistsError):
        Loop(records=tmp_path)


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line if isinstance(line, bytes) else msgspec.json.encode(line) + b"\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "is empty"),
        ([b"not json\n"], "is not the description of a run"),
        ([{"kind": "step", "version": 1, "run": "a", "rank": 0, "step": 0}], "not the description of a run but a step"),
        ([{"kind": "run", "version": 2, "something": "new"}], "has version 2, this headrace reads version 1"),
        ([FACTS, b"{broken\n"], ":2 is not a record headrace wrote"),
        ([FACTS, {"kind": "step", "run": "b", "rank": 0, "step": 0}], "another run or rank"),
        ([FACTS, {"kind": "step", "run": "a", "rank": 1, "step": 0}], "another run or rank"),
        ([FACTS, FACTS], "another run or rank"),
        ([FACTS, {"kind": "step", "run": "a", "rank": 0, "step": "zero"}], "not a record"),
        ([FACTS, {"kind": "step", "run": "a", "rank": 0, "step": 0, "step_ns": 0}], r":2 is not a record.*step_ns"),
        ([FACTS, {"kind": "step", "run": "a", "rank": 0, "step": 0, "step_ns": -5}], r":2 is not a record.*step_ns"),
        ([FACTS, {"kind": "step", "run": "a", "rank": 0, "step": 0, "tokens": -1}], r":2 is not a record.*tokens"),
        ([b'{"kind": "run", "version": 1, "run": "a", "rank": 0, "world_size": 0}\n'], r":1 is not .*world_size"),
        ([b'{"kind": "run", "version": 1, "run": "a", "rank": 0, "world_size": 1, "peak_flops": NaN}\n'], ":1 is not"),
    ],
)
def test_files_that_are_not_records_are_refused_with_file_and_line(tmp_path, lines, words):
    path = write(tmp_path / "rank.jsonl", *lines)
    with pytest.raises(FormatError, match=words):
        read_file(path)


def test_a_file_cut_off_by_a_kill_is_read_up_to_there(tmp_path):
    loop = Loop(records=tmp_path).train(5)
    loop.run.close()
    path = tmp_path / "a" / "rank00000.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    got = read_file(path)
    assert got.truncated
    assert len(got.steps) == 5


def test_ranks_of_one_run_are_found_and_mixtures_refused(tmp_path):
    for rank in (1, 0):
        write(tmp_path / "a" / f"rank{rank}.jsonl", msgspec.structs.replace(FACTS, rank=rank))
    assert [one.facts.rank for one in read_run(tmp_path)] == [0, 1]
    assert [one.facts.rank for one in read_run(tmp_path / "a")] == [0, 1]
    write(tmp_path / "b" / "rank0.jsonl", msgspec.structs.replace(FACTS, run="b"))
    with pytest.raises(FormatError, match=r"several runs \(a, b\)"):
        read_run(tmp_path)
    write(tmp_path / "a" / "again.jsonl", FACTS)
    with pytest.raises(FormatError, match="a rank twice"):
        read_run(tmp_path / "a")
    with pytest.raises(ConfigError, match="holds no records"):
        read_run(tmp_path / "nothing")
