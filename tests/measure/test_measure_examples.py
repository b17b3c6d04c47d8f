"""The examples run, and measure what they say they measure."""

import importlib.util
from pathlib import Path

import pytest

from headrace.measure.record import read_run

torch = pytest.importorskip("torch")
EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seen(run):
    return {name for name, phase in run.summary().phases.items() if phase.mean_s is not None}


def test_a_plain_loop(tmp_path, capsys):
    run = example("measure_loop").main(steps=12, records=str(tmp_path))
    assert seen(run) == {"data", "forward", "backward", "optimizer", "post", "communication", "other"}
    assert run.summary().throughput.tokens_per_s > 0
    (rank,) = read_run(tmp_path)
    assert [(step.samples, step.tokens) for step in rank.steps] == [(16, 512)] * 12
    assert "headrace: 9 steps (3 to 11)" in capsys.readouterr().out


def test_a_trainer_callback(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run = example("measure_trainer").main(steps=8, records=str(tmp_path))
    assert {"data", "forward", "backward", "optimizer"} <= seen(run)
    summary = run.summary()
    assert set(summary.excluded_s) == {"evaluation", "checkpoint"}
    assert summary.notes == ()
    (rank,) = read_run(tmp_path)
    assert [step.samples for step in rank.steps] == [8] * 8
    assert rank.facts.shape.layers == 1
    assert all(step.reasons == {} for step in rank.steps), "every span was closed in its step"


def test_a_fabric_loop(tmp_path):
    pytest.importorskip("lightning_fabric")
    run = example("measure_fabric").main(steps=8, records=str(tmp_path))
    assert {"data", "forward", "backward", "optimizer"} <= seen(run)
    assert run.summary().num_steps == 5


def test_the_three_line_loggers():
    loggers, calls = example("measure_loggers"), []

    class Anything:
        def add_scalar(self, name, value, step):
            calls.append(("tensorboard", name, value, step))

        def log(self, metrics, step):
            calls.append(("wandb", metrics, step))

        def log_metrics(self, metrics, step):
            calls.append(("mlflow", metrics, step))

    for name in ("tensorboard", "wandb", "mlflow"):
        getattr(loggers, name)(Anything())({"mfu(%)": 41.5}, 7)
    assert calls == [
        ("tensorboard", "mfu(%)", 41.5, 7),
        ("wandb", {"mfu(%)": 41.5}, 7),
        ("mlflow", {"mfu percent": 41.5}, 7),
    ]


def test_the_loggers_show_what_they_would_send(capsys):
    run = example("measure_loggers").main(steps=8)
    shown = capsys.readouterr().out
    assert run.summary().num_steps == 5
    assert "add_scalar('headrace/samples_per_s', " in shown
    assert "--- Weights & Biases\nlog(" in shown
    assert "--- MLflow\nlog_metrics(" in shown
    assert "step=7" in shown
