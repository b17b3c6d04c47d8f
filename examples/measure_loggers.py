"""Three lines each: the figures of every window in TensorBoard, Weights & Biases and MLflow.

    run = measure.start(model, optimizer, log_metrics=tensorboard(SummaryWriter("logs")))
    run = measure.start(model, optimizer, log_metrics=wandb(wandb.init(project="mine")))
    run = measure.start(model, optimizer, log_metrics=mlflow(mlflow))

The names are torchtitan's where it has one (`throughput(tps)`, `mfu(%)`, `time_metrics/...`, `memory/...`), ours below
`headrace/`. What was not measured is not logged.

python examples/measure_loggers.py [--steps 20]

measures a small loop and prints what each of the three would be given, none of them installed.
"""

import argparse

import torch

from headrace.torch import measure


def tensorboard(writer):
    """`writer` is a torch.utils.tensorboard.SummaryWriter."""

    def log(metrics, step):
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log


def wandb(run):
    """`run` is what wandb.init() returned."""

    def log(metrics, step):
        run.log(metrics, step=step)

    return log


def mlflow(module):
    """`module` is the mlflow module, inside an active run. MLflow refuses '(' and '%' in names."""

    def log(metrics, step):
        plain = {
            name.replace("(", " ").replace(")", "").replace("%", "percent"): value for name, value in metrics.items()
        }
        module.log_metrics(plain, step=step)

    return log


class Printed:
    """Stands for any of the three: prints the calls it gets instead of sending them anywhere."""

    def add_scalar(self, name, value, step):
        print(f"add_scalar({name!r}, {value:.6g}, {step})")

    def log(self, metrics, step):
        print(f"log({shortened(metrics)}, step={step})")

    def log_metrics(self, metrics, step):
        print(f"log_metrics({shortened(metrics)}, step={step})")


def shortened(metrics):
    """The first three of many."""
    return ", ".join([f"{name!r}: {value:.6g}" for name, value in list(metrics.items())[:3]] + ["..."])


def main(steps=20):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loggers = {"TensorBoard": tensorboard(Printed()), "Weights & Biases": wandb(Printed()), "MLflow": mlflow(Printed())}

    def log(metrics, step):
        for name, one in loggers.items():
            print(f"--- {name}")
            one(metrics, step)

    run = measure.start(model, optimizer, log_metrics=log, log_every=steps, print_line=None)
    for batch in run.batches(torch.randn(steps, 16, 64)):
        run.count(samples=len(batch))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    main(**vars(parser.parse_args()))
