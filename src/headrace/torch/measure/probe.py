"""What the batch size search runs on torch: real steps, and afterwards everything as it was.

`FactoryProbe` builds its model anew for every size (`headrace tune`, tables over recompute). `TrainingProbe` uses the
model and optimizer that will be trained, and puts their state back.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns
from typing import Any, TypeAlias

import numpy as np
import torch

from headrace.errors import ConfigError
from headrace.measure.batch_size import BeyondMargin, Trained
from headrace.torch.measure.devices import DeviceBackend, backend_of

TrainStep: TypeAlias = Callable[[int], None]
"""train_step(batch_size): forward, backward and the optimizer's step on a batch of the longest sequences."""

MIN_STEPS = 2
"""The first step makes the optimizer's state, the second is the first with all of it in memory."""
MEMORY_SHARE = 0.95
"""Reserved memory above this share of the device may not fit tomorrow: fragmentation, other lengths, a new driver."""


class RandomState:
    """The generators a step may draw from: Python's, NumPy's, torch's and the device's."""

    def __init__(self, backend: DeviceBackend) -> None:
        self.backend = backend
        self.python, self.numpy, self.torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self.device = backend.random_state()

    def put_back(self) -> None:
        """Continue as if nothing had been drawn."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        self.backend.set_random_state(self.device)


class FactoryProbe:
    """Builds a model, trains it some steps at one size, throws it away.

    `build()` returns the train step of a fresh model. Raises ConfigError for fewer than two steps.
    """

    def __init__(
        self,
        build: Callable[[], TrainStep],
        *,
        device: torch.device | str = "cpu",
        steps: int = MIN_STEPS,
        memory_share: float = MEMORY_SHARE,
    ) -> None:
        self.build, self.steps, self.memory_share = build, checked(steps), memory_share
        self.backend = backend_of(device)
        self.before = RandomState(self.backend)
        self.train_step: TrainStep | None = None

    def run(self, batch_size: int) -> Trained:
        """Build and train; times the training alone."""
        self.train_step = self.build()
        return train(self.train_step, batch_size, self.steps, self.backend, self.memory_share)

    def restore(self) -> None:
        """Forget the model; put the generators back; free the device's cache."""
        self.train_step = None
        self.before.put_back()
        self.backend.empty_cache()


class TrainingProbe:
    """Trains the given model some steps at one size and puts everything back.

    The copy of weights and optimizer state lies in host memory. `stateful` are further objects with
    state_dict/load_state_dict (scheduler, scaler, the feed): their state is kept and put back as well.
    """

    def __init__(
        self,
        train_step: TrainStep,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        stateful: Sequence[Any] = (),
        device: torch.device | str | None = None,
        steps: int = MIN_STEPS,
        memory_share: float = MEMORY_SHARE,
    ) -> None:
        first = next(model.parameters())
        self.train_step, self.model, self.optimizer = train_step, model, optimizer
        self.steps, self.memory_share = checked(steps), memory_share
        self.backend = backend_of(first.device if device is None else device)
        self.before = RandomState(self.backend)
        self.tensors = [on_host(tensor) for tensor in tensors_of(model)]
        self.gradients = [None if p.grad is None else on_host(p.grad) for p in model.parameters()]
        self.optimizer_state = copy.deepcopy(optimizer.state_dict())
        self.stateful = [(one, copy.deepcopy(one.state_dict())) for one in stateful]

    def run(self, batch_size: int) -> Trained:
        """Train, timed."""
        return train(self.train_step, batch_size, self.steps, self.backend, self.memory_share)

    def restore(self) -> None:
        """Weights, buffers, gradients, optimizer, generators and the stateful objects as before."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer_state))
        with torch.no_grad():
            for tensor, saved in zip(tensors_of(self.model), self.tensors, strict=True):
                local_part(tensor).copy_(saved)
            for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
                if gradient is not None:
                    parameter.grad = torch.zeros_like(parameter)
                    local_part(parameter.grad).copy_(gradient)
        for one, state in self.stateful:
            one.load_state_dict(copy.deepcopy(state))
        self.before.put_back()
        self.backend.empty_cache()


def train(
    train_step: TrainStep,
    batch_size: int,
    steps: int,
    backend: DeviceBackend,
    memory_share: float,
) -> Trained:
    """Run the steps, wait for the device, and refuse what only just fitted.

    The first step is not timed: it makes the optimizer's state, and the allocator and the kernels settle in it.
    """
    if backend.asynchronous:
        backend.read_memory()
    train_step(batch_size)
    backend.synchronize()
    start = perf_counter_ns()
    for _ in range(steps - 1):
        train_step(batch_size)
    backend.synchronize()
    seconds = (perf_counter_ns() - start) / 1e9
    if backend.asynchronous:
        memory = backend.read_memory()
        if memory.capacity_bytes and memory.peak_reserved_bytes > memory_share * memory.capacity_bytes:
            raise BeyondMargin(
                reserved_bytes=memory.peak_reserved_bytes, capacity_bytes=memory.capacity_bytes, share=memory_share
            )
    return Trained(samples=(steps - 1) * batch_size, seconds=seconds)


def tensors_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """All parameters and buffers, also the buffers a state dict leaves out."""
    yield from model.parameters()
    yield from model.buffers()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor, or the tensor itself."""
    detached = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory."""
    return local_part(tensor).to("cpu", copy=True)


def checked(steps: int) -> int:
    """At least two steps, or memory that only the second needs would go unnoticed."""
    if steps < MIN_STEPS:
        raise ConfigError(f"a probe trains at least {MIN_STEPS} steps (the first makes optimizer state), got {steps}")
    return steps
