"""The torch side on the CPU: hooks that change nothing, counts that come out, and a device that is only pretended."""

import logging
import math
import subprocess
import sys
import textwrap
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from headrace.errors import ConfigError  # noqa: E402
from headrace.measure.batch_size import BeyondMargin, find_batch_size  # noqa: E402
from headrace.measure.record import read_run  # noqa: E402
from headrace.measure.step import Step  # noqa: E402
from headrace.torch import measure  # noqa: E402
from headrace.torch.measure.devices import DeviceBackend, backend_of  # noqa: E402
from headrace.torch.measure.hooks import attach  # noqa: E402
from headrace.torch.measure.start import describe  # noqa: E402

from .fakes import MS, FakeClock, FakeDevice  # noqa: E402


class Slow(torch.nn.Module):
    """A layer whose forward and backward take time on a fake clock."""

    def __init__(self, clock, forward_ms=3, backward_ms=5):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

        class Tick(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                clock.advance(ms=forward_ms)
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                clock.advance(ms=backward_ms)
                return gradient

        self.tick = Tick

    def forward(self, x):
        return self.tick.apply(self.inner(x))


class HookedLoop:
    """A loop that nobody changed, with the hooks installed."""

    def __init__(self, **options):
        self.clock, self.steps = FakeClock(), []
        self.model = Slow(self.clock)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = Step(clock=self.clock, sink=lambda times, payload: self.steps.append(times))
        self.undo = attach(self.step, self.model, [self.optimizer], end=self.step.end, **options)

    def train(self, steps=1, micro_batches=1):
        for _ in range(steps):
            for _ in range(micro_batches):
                self.model(torch.ones(1, 2)).sum().backward()
            self.clock.advance(ms=1)
            self.optimizer.step()
            self.optimizer.zero_grad()


def test_hooks_bracket_a_loop_that_was_not_changed():
    loop = HookedLoop()
    loop.train(steps=2, micro_batches=4)
    loop.undo()
    phases = loop.steps[1].phases_ns
    assert (phases["forward"], phases["backward"], phases["other"]) == (12 * MS, 20 * MS, MS)
    assert phases["optimizer"] == 0
    assert loop.steps[1].step_ns == 33 * MS


def test_removing_the_hooks_leaves_nothing_behind():
    before = torch.autograd.backward
    loop = HookedLoop()
    assert torch.autograd.backward is not before
    loop.undo()
    assert torch.autograd.backward is before
    loop.train()
    assert loop.steps == []
    assert not loop.model._forward_hooks
    assert not loop.model._forward_pre_hooks


def test_a_wrapper_put_around_ours_survives_the_removal():
    before = torch.autograd.backward
    loop = HookedLoop()
    ours = torch.autograd.backward

    def theirs(*arguments, **options):
        return ours(*arguments, **options)

    torch.autograd.backward = theirs
    try:
        loop.undo()
        assert torch.autograd.backward is theirs
        loop.train()
        assert loop.steps == []
    finally:
        torch.autograd.backward = before


def test_evaluation_mode_is_not_forward():
    loop = HookedLoop()
    loop.model.eval()
    loop.model(torch.ones(1, 2))
    loop.model.train()
    loop.train()
    loop.undo()
    assert loop.steps[0].phases_ns["forward"] == 3 * MS
    assert loop.steps[0].phases_ns["other"] == 3 * MS + MS


def test_a_forward_that_raises_closes_its_span():
    loop = HookedLoop()
    with pytest.raises(RuntimeError):
        loop.model(torch.ones(1, 3))
    loop.train()
    loop.undo()
    assert loop.steps[0].phases_ns["forward"] == 3 * MS


def test_a_closure_runs_forward_and_backward_inside_the_optimizer():
    loop = HookedLoop()

    def closure():
        loss = loop.model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    loop.optimizer.step(closure)
    loop.undo()
    phases = loop.steps[0].phases_ns
    assert (phases["forward"], phases["backward"], phases["optimizer"]) == (3 * MS, 5 * MS, 0)


def test_the_step_ends_behind_the_last_optimizer():
    loop = HookedLoop()
    loop.undo()
    second = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    undo = attach(loop.step, loop.model, [loop.optimizer, second], end=loop.step.end)
    loop.train()
    assert loop.steps == []
    second.step()
    assert len(loop.steps) == 1
    undo()


@pytest.mark.filterwarnings("ignore")
def test_hooks_do_not_break_a_compiled_model():
    model = torch.nn.Linear(4, 4)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = measure.start(compiled, optimizer, warmup_steps=0, print_line=None)
    for _ in range(3):
        compiled(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    run.close()
    assert run.summary().num_steps == 3
    assert run.summary().phases["forward"].mean_s > 0


def test_training_is_bitwise_the_same_with_and_without_measuring():
    def train(measured):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        run = measure.start(model, optimizer, print_line=None) if measured else None
        for _ in range(5):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if run is not None:
            run.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(train(False), train(True), strict=True))


def test_start_finds_out_what_runs(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters())
    lines = []
    run = measure.start(model, optimizer, records=tmp_path, log_every=2, print_line=lines.append, warmup_steps=1,
                        peak_flops=1e12, label="tiny")  # fmt: skip
    batches = [torch.randint(0, 128, (2, 16)) for _ in range(5)]
    for batch in run.batches(batches):
        run.count(samples=len(batch), tokens=batch.numel())
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    text = run.close()
    assert "MFU" in text
    assert len(lines) == 2
    (rank,) = read_run(tmp_path)
    assert (rank.facts.device, rank.facts.dtype, rank.facts.label) == ("cpu", "float32", "tiny")
    assert rank.facts.shape.layers == 1
    assert rank.facts.environment.torch == torch.__version__
    assert len(rank.steps) == 5
    for step in rank.steps:
        known = [value for value in step.phases_ns.values() if value is not None]
        assert sum(known) == step.step_ns
        assert min(step.phases_ns[name] for name in ("data", "forward", "backward", "optimizer")) > 0
        assert step.phases_ns["communication"] == 0, "one process has nobody to talk to"
    summary = run.summary()
    assert summary.throughput.tokens_per_s == pytest.approx(summary.throughput.samples_per_s * 16)
    assert 0 < summary.mfu.value < 1


def test_a_training_that_ends_in_an_exception_has_its_last_steps_in_the_records(tmp_path):
    program = textwrap.dedent(f"""
        import os
        from headrace.torch import measure
        run = measure.start(records={str(tmp_path)!r}, print_line=None)
        for _ in range(13):
            with run.step.forward:
                pass
            run.end()
        if not (child := os.fork()):
            raise SystemExit
        assert os.waitpid(child, 0)[1] == 0
        raise SystemError("the loss is NaN")
    """)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stderr.endswith("SystemError: the loss is NaN\n")
    (records,) = read_run(tmp_path)
    assert [step.step for step in records.steps] == list(range(13))
    assert not records.truncated


def test_without_a_model_the_spans_are_the_users():
    run = measure.start(print_line=None, warmup_steps=0)
    with run.step.forward:
        pass
    run.end()
    run.close()
    assert run.summary().num_steps == 1
    assert run.summary().phases["forward"].mean_s > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda"}, "no device on this machine|no device called"),
        ({"device": "npu"}, "needs torch_npu"),
        ({"device": "abacus"}, "no device called 'abacus'"),
        ({"parallel": measure.Parallel(tensor_parallel_size=2)}, "make 2 devices, the job has 1"),
        ({"peak_flops": math.nan}, "peak_flops are operations per second"),
        ({"peak_flops": math.inf}, "peak_flops are operations per second"),
        ({"peak_flops": -1e12}, "peak_flops are operations per second"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0"),
        ({"sequence_length": 0}, "sequence_length must be at least 1"),
        ({"recompute": "some"}, "recompute is"),
        ({"attention": "half"}, "attention is"),
        ({"log_every": 0}, "log_every must be at least 1"),
        ({"log_every": 2.5}, "log_every must be a whole number"),
    ],
)
def test_what_is_impossible_is_said_at_the_start(options, words):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match=words):
        measure.start(print_line=None, **options)


@pytest.mark.parametrize("size", [0, -2, 1.5, math.nan])
def test_a_parallel_size_that_cannot_be_is_refused(size):
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        measure.Parallel(tensor_parallel_size=size)


def test_a_data_rank_outside_of_its_size_is_refused():
    with pytest.raises(ConfigError):
        measure.Parallel(data_rank=2, data_parallel_size=2)


def test_a_tensor_parallel_model_is_not_taken_for_data_parallel():
    from headrace.torch.measure.start import every_rank_its_own_samples

    model = torch.nn.Linear(1, 1)
    assert every_rank_its_own_samples(model, 1, 4) == measure.Parallel(data_rank=1, data_parallel_size=4)
    model.tp_size = 2
    with pytest.raises(ConfigError, match="tensor parallel over 2 ranks"):
        every_rank_its_own_samples(model, 1, 4)


def test_torch_npu_is_never_imported_unless_asked_for():
    assert "torch_npu" not in sys.modules
    describe(None)
    assert "torch_npu" not in sys.modules


class FakeModule(ModuleType):
    """`torch.fake`: the functions torch.cuda and torch.npu share, over a fake device."""

    def __init__(self, device, *, with_events=True):
        super().__init__("torch.fake")
        self.device = device
        self.reserved, self.resets, self.recorded_on = 4 * 2**30, 0, []
        if with_events:
            self.Event = lambda enable_timing: device.new_event()

    def is_available(self):
        return True

    def get_device_name(self, device):
        return "NVIDIA H200"

    def get_device_properties(self, device):
        class Properties:
            total_memory = 16 * 2**30

        return Properties

    def memory_stats(self, device):
        return {
            "allocated_bytes.all.peak": 3 * 2**30, "reserved_bytes.all.peak": self.reserved, "num_alloc_retries": 1,
            "num_ooms": 0, "active_bytes.all.peak": 3 * 2**30,
        }  # fmt: skip

    def reset_peak_memory_stats(self, device):
        self.resets += 1

    def synchronize(self, device):
        self.device.synchronised += 1

    def empty_cache(self):
        pass

    def get_rng_state(self, device):
        return torch.zeros(1)

    def set_rng_state(self, state, device):
        pass


@pytest.fixture
def fake_device(monkeypatch):
    clock = FakeClock()
    device = FakeDevice(clock)
    module = FakeModule(device)
    monkeypatch.setattr("headrace.torch.measure.devices.device_module", lambda kind: module)
    monkeypatch.setattr("headrace.torch.measure.devices.torch.device", lambda name: FakeTorchDevice(name))
    return clock, device, module


class FakeTorchDevice:
    def __init__(self, name):
        kind, _, index = str(name).partition(":")
        self.type, self.index = kind, int(index) if index else None

    def __str__(self):
        return self.type if self.index is None else f"{self.type}:{self.index}"


def test_a_device_is_found_by_name_with_its_peak_events_and_memory(fake_device):
    clock, device, module = fake_device
    logged = []
    run = measure.start(
        device="npu", dtype="bfloat16", log_metrics=lambda found, step: logged.append(found), print_line=None,
        warmup_steps=0,
    )  # fmt: skip
    assert run.facts.peak_flops == 989.4e12
    assert (run.facts.device, run.facts.device_name) == ("npu", "NVIDIA H200")
    run.step.clock = clock
    run.step.begin()
    for _ in range(12):
        with run.step.forward:
            device.launch(10)
        clock.advance(ms=10)
        run.end()
    run.close()
    assert run.summary().phases["forward"].mean_s == pytest.approx(0.010, rel=0.01)
    assert logged[0]["memory/max_reserved(GiB)"] == 4.0
    assert module.resets >= 1


def test_a_device_without_events_has_times_of_the_whole_step_only(fake_device):
    _, _, module = fake_device
    del module.Event
    backend = backend_of("xpu")
    assert "has no events" in backend.blind
    run = measure.start(device="xpu", print_line=None, warmup_steps=0)
    with run.step.forward:
        pass
    run.end()
    run.close()
    assert run.summary().mean_step_s > 0
    assert "has no events" in run.summary().phases["forward"].reason


def test_a_named_device_records_on_its_own_stream(fake_device):
    _, _, module = fake_device
    streams = []
    module.current_stream = lambda index: streams.append(index) or "stream"
    module.Event = lambda enable_timing: RecordingEvent()
    event = backend_of("cuda:1").new_event()
    event.record()
    assert streams == [1]
    assert event.event.stream == "stream"
    assert event.query()
    event.synchronize()
    assert event.elapsed_time(event) == 1.5


class RecordingEvent:
    def record(self, stream):
        self.stream = stream

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1.5


def small_model():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    model.register_buffer("unsaved", torch.zeros(3), persistent=False)
    return model, torch.optim.AdamW(model.parameters())


class Cursor:
    """A data source with a position."""

    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_after_the_search_training_continues_bitwise_as_if_there_had_been_none():
    """Lightning #13696, #11295: model, optimizer, generators and data position as before, also after a failed size."""

    def train(searched):
        torch.manual_seed(3)
        model, optimizer = small_model()
        cursor = Cursor()

        def step(batch_size):
            cursor.position += batch_size
            model.unsaved += 1
            optimizer.zero_grad()
            model(torch.randn(batch_size, 8)).square().mean().backward()
            if batch_size > 40:
                raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
            optimizer.step()

        step(4)
        model[0].weight.grad.fill_(7.0)
        if searched:
            probe = measure.TrainingProbe(step, model=model, optimizer=optimizer, stateful=[cursor])
            assert find_batch_size(probe, upper=256).largest == 32
        assert cursor.position == 4
        assert model[0].weight.grad[0, 0] == 7.0
        assert torch.equal(model.unsaved, torch.ones(3))
        for _ in range(3):
            step(4)
        state = [tensor.clone() for tensor in (*model.state_dict().values(), model.unsaved)]
        state += [value["exp_avg"].clone() for value in optimizer.state.values()]
        return state

    plain, searched = train(False), train(True)
    assert len(plain) == len(searched)
    assert all(torch.equal(one, other) for one, other in zip(plain, searched, strict=True))


def test_a_fresh_optimizer_is_fresh_again():
    model, optimizer = small_model()
    probe = measure.TrainingProbe(
        lambda batch_size: (model(torch.randn(batch_size, 8)).sum().backward(), optimizer.step()),
        model=model, optimizer=optimizer,
    )  # fmt: skip
    assert probe.run(4).samples == 4
    assert optimizer.state
    probe.restore()
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_probe_takes_two_steps_at_least():
    with pytest.raises(ConfigError, match="at least 2 steps"):
        measure.FactoryProbe(lambda: lambda batch_size: None, steps=1)


def test_the_factory_builds_anew_for_every_size_and_keeps_nothing():
    built = []

    def build():
        torch.randn(3)
        built.append(1)
        return lambda batch_size: None

    torch.manual_seed(1)
    expected = torch.randn(1)
    torch.manual_seed(1)
    probe = measure.FactoryProbe(build)
    got = find_batch_size(probe, upper=64)
    assert len(built) == len(got.tried)
    assert probe.train_step is None
    assert torch.equal(torch.randn(1), expected), "the search must not move the generators"


def test_building_a_model_and_its_first_step_are_no_throughput(monkeypatch):
    clock, steps = FakeClock(), []

    def build():
        clock.advance(ms=5000)

        def train_step(batch_size):
            steps.append(batch_size)
            clock.advance(ms=10 if len(steps) > 1 else 900)

        return train_step

    monkeypatch.setattr("headrace.torch.measure.probe.perf_counter_ns", clock)
    trained = measure.FactoryProbe(build, steps=4).run(16)
    assert steps == [16] * 4
    assert (trained.samples, trained.seconds) == (48, pytest.approx(0.030))
    got = find_batch_size(measure.FactoryProbe(build), upper=16, clock=clock)
    assert got.tried[0].samples_per_s == pytest.approx(16 / 0.010)


def test_what_only_just_fitted_is_refused(fake_device):
    _, _, module = fake_device
    probe = measure.FactoryProbe(lambda: lambda batch_size: None, device="cuda")
    assert probe.run(4).samples == 4
    module.reserved = int(15.5 * 2**30)
    with pytest.raises(BeyondMargin, match=r"15\.50 of 16\.00 GiB"):
        probe.run(4)
    probe.restore()


def test_real_memory_errors_of_the_cpu_allocator_are_recognised():
    from headrace.measure.batch_size import is_out_of_memory

    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_a_failing_hook_target_never_stops_training(caplog):
    loop = HookedLoop()

    def broken():
        raise OSError("no clock")

    loop.step.clock = broken
    with caplog.at_level(logging.WARNING, "headrace.measure"):
        loop.train(steps=3)
    loop.undo()
    assert loop.step.failure == "OSError: no clock"
    assert math.isfinite(loop.model.inner.weight.sum().item())


def test_the_cpu_backend_has_nothing_to_read():
    backend = backend_of("cpu")
    assert isinstance(backend, DeviceBackend)
    assert (backend.asynchronous, backend.blind, backend.name(), backend.random_state()) == (False, None, None, None)
    backend.synchronize()
    backend.empty_cache()
    backend.set_random_state(None)


class PendingWork:
    """A gather on its way: waiting for it would hold the loop."""

    def __init__(self):
        self.done = False

    def is_completed(self):
        return self.done

    def wait(self, timeout=None):
        assert self.done, "the loop must not wait for another rank"


def test_a_gather_never_waits_for_a_rank_and_ends_when_one_stays_silent(monkeypatch):
    """Megatron #804: timers that met a barrier hung with the rank they were to find."""
    sent = []

    def all_gather(rows, mine, *, group, async_op):
        assert async_op
        for row in rows:
            row.copy_(mine)
        sent.append(PendingWork())
        return sent[-1]

    monkeypatch.setattr("headrace.torch.measure.gather.all_gather", all_gather)
    monkeypatch.setattr("headrace.torch.measure.gather.dist.get_world_size", lambda group: 2)
    gather = measure.GlooGather(group="a gloo group")
    gather.submit([1.0, math.nan])
    assert gather.ready() == []
    sent[0].done = True
    ((first, second),) = gather.ready()
    assert first[0] == second[0] == 1.0
    assert math.isnan(first[1])
    for _ in range(8):
        gather.submit([2.0])
    with pytest.raises(RuntimeError, match="8 windows are unanswered"):
        gather.submit([2.0])


def test_alone_agreement_is_ones_own_word():
    assert measure.agree_on_minimum()(3) == 3
