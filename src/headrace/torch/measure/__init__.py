"""Measure a PyTorch training loop: where a step's time goes, how fast it is, what limits it. Works without the feed.

    from headrace.torch import measure

    run = measure.start(model, optimizer, records="records")      # forward, backward and optimizer are hooked
    for batch in run.batches(loader):                             # waiting for the batch is `data`
        run.count(samples=len(batch), tokens=batch.numel())       # once per micro batch
        ...                                                       # the loop as it was
    print(run.close())

`docs/measure.md` has each figure's formula, unit, source, and how it can mislead.
"""

from headrace.measure.batch_size import batch_size_table, find_batch_size
from headrace.measure.flops import ModelShape
from headrace.measure.run import Run
from headrace.measure.step import Step
from headrace.torch.measure.collectives import wrap_collectives
from headrace.torch.measure.devices import backend_of
from headrace.torch.measure.gather import GlooGather, agree_on_minimum
from headrace.torch.measure.hooks import attach
from headrace.torch.measure.probe import FactoryProbe, TrainingProbe
from headrace.torch.measure.start import Parallel, start

__all__ = [
    "FactoryProbe",
    "GlooGather",
    "ModelShape",
    "Parallel",
    "Run",
    "Step",
    "TrainingProbe",
    "agree_on_minimum",
    "attach",
    "backend_of",
    "batch_size_table",
    "find_batch_size",
    "start",
    "wrap_collectives",
]
