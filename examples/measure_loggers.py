"""Three lines each: the figures of every window in TensorBoard, Weights & Biases and MLflow.

    run = measure.start(model, optimizer, log_metrics=tensorboard(SummaryWriter("logs")))
    run = measure.start(model, optimizer, log_metrics=wandb(wandb.init(project="mine")))
    run = measure.start(model, optimizer, log_metrics=mlflow(mlflow))

The names are torchtitan's where it has one (`throughput(tps)`, `mfu(%)`, `time_metrics/...`, `memory/...`), ours below
`headrace/`. What was not measured is not logged.
"""


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
