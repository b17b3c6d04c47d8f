"""A training loop with and without the toolkit, step by step in turns: the inner part of `headrace bench measure`.

Both sides train the same parameters with the same optimizer state. They differ in the outermost module, the optimizer
object and `torch.autograd.backward`, which carry the hooks on one side only, so nothing has to be put on and taken off
between two steps. The order of the two changes from pair to pair.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from headrace.measure.clock import Clock
from headrace.measure.model_config import shape_from_transformers
from headrace.torch import measure


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model of the transformers package and one batch of tokens for it."""

    name: str
    model: Any
    tokens: Any

    @property
    def num_modules(self) -> int:
        return sum(1 for _ in self.model.modules())


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Microseconds of each step, [clock][pair]; the window's report falls into every `log_every`-th measured one."""

    log_every: int
    plain: dict[str, list[float]] = field(default_factory=dict)
    measured: dict[str, list[float]] = field(default_factory=dict)


class Outermost(torch.nn.Module):
    """The same model under a second root, for hooks of its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Any) -> Any:
        """The loss of one batch."""
        return self.model(input_ids=tokens, labels=tokens).loss


def small_model() -> Model:
    """A Llama whose step takes some ten milliseconds on one core."""
    return llama("2 layers", layers=2, hidden=128, tokens=(4, 64))


def model_of_many_modules() -> Model:
    """A Llama of hundreds of modules, each hardly larger than the cost of calling it."""
    return llama("48 layers", layers=48, hidden=16, tokens=(1, 8))


def llama(name: str, *, layers: int, hidden: int, tokens: tuple[int, int]) -> Model:
    """Random weights, random tokens, the same every time."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return Model(
        name=name,
        model=AutoModelForCausalLM.from_config(config).train(),
        tokens=torch.randint(0, 1024, tokens),
    )


@contextmanager
def measured_run(model: Model, log_every: int) -> Iterator[measure.Run]:
    """Everything on that `start` turns on, and a logger that does nothing with the figures."""
    with tempfile.TemporaryDirectory() as folder:
        run = measure.start(
            records=Path(folder),
            print_line=None,
            log_metrics=lambda metrics, step: None,
            log_every=log_every,
            shape=shape_from_transformers(model.model.config),
        )
        try:
            yield run
        finally:
            run.close()


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch: two on two shared cores wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_pairs(model: Model, *, num_pairs: int, log_every: int, clocks: dict[str, Clock]) -> Pairs:
    """Train `num_pairs` steps of each side, the two of a pair next to each other, and time every step."""
    plain, hooked = Outermost(model.model), Outermost(model.model)
    optimizer, hooked_optimizer = (torch.optim.AdamW(model.model.parameters()) for _ in range(2))
    hooked_optimizer.state = optimizer.state
    pairs = Pairs(log_every=log_every, plain={name: [] for name in clocks}, measured={name: [] for name in clocks})
    with measured_run(model, log_every) as run:
        unwrapped = torch.autograd.backward
        detach = measure.attach(run.step, hooked, [hooked_optimizer], end=run.end)
        wrapped = torch.autograd.backward
        batches, measured_batches = repeat(model.tokens), run.batches(repeat(model.tokens))

        def plain_step() -> None:
            tokens = next(batches)
            plain(tokens).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        def measured_step() -> None:
            tokens = next(measured_batches)
            run.count(samples=len(tokens), tokens=tokens.numel())
            hooked(tokens).backward()
            hooked_optimizer.step()
            hooked_optimizer.zero_grad(set_to_none=True)

        try:
            for number in range(num_pairs):
                for is_measured in (False, True) if number % 2 else (True, False):
                    torch.autograd.backward = wrapped if is_measured else unwrapped
                    run.step.begin()
                    time_step(
                        measured_step if is_measured else plain_step,
                        clocks,
                        pairs.measured if is_measured else pairs.plain,
                    )
        finally:
            torch.autograd.backward = wrapped
            detach()
    return pairs


def time_step(step: Callable[[], None], clocks: dict[str, Clock], values_us: dict[str, list[float]]) -> None:
    """One step by each clock."""
    starts = [clock() for clock in clocks.values()]
    step()
    for (name, clock), start in zip(clocks.items(), starts, strict=True):
        values_us[name].append((clock() - start) / 1e3)


def cold_calls(
    model: Model, *, num_steps: int, log_every: int, clock: Clock = time.perf_counter_ns
) -> dict[str, list[float]]:
    """Microseconds of each call of the toolkit when a step of the model has just emptied the caches."""
    optimizer = torch.optim.AdamW(model.model.parameters())
    outermost = Outermost(model.model)
    values: dict[str, list[float]] = {}
    with measured_run(model, log_every) as run:

        def a_span() -> None:
            with run.step.forward:
                pass

        calls: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "span": a_span,
            "count": lambda: run.count(samples=4, tokens=256),
            "end of a step": run.end,
        }
        for number in range(num_steps):
            for name, call in calls.items():
                outermost(model.tokens).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                start = clock()
                call()
                spent = (clock() - start) / 1e3
                reports = name == "end of a step" and (number + 1) % log_every == 0
                values.setdefault("end of a window" if reports else name, []).append(spent)
    return values
