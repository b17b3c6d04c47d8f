"""Forward, backward and optimizer bracketed without a change of the loop.

Forward: hooks around the outermost module, in training mode only. Optimizer: its own step hooks; behind the last
optimizer's step the measured step ends. Backward: `torch.autograd.backward`, which `Tensor.backward` calls, is wrapped
while the hooks are installed. A module's backward hooks would not do: they wrap the outputs, so that models which
change them in place fail, and on a GPU they run in autograd's threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from headrace.measure.step import Step

Undo: TypeAlias = Callable[[], None]


def attach(
    step: Step,
    model: torch.nn.Module | None,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    end: Callable[[], None] | None,
) -> Undo:
    """Install the hooks; `end` (if any) is called behind the last optimizer's step. Returns what removes them all."""
    undo: list[Undo] = []
    if model is not None:
        undo += attach_forward(step, model)
        undo.append(wrap_backward(step))
        step.observe("forward", "backward")
    for optimizer in optimizers:
        undo += attach_optimizer(step, optimizer, end if optimizer is optimizers[-1] else None)
        step.observe("optimizer")

    def remove() -> None:
        while undo:
            undo.pop()()

    return remove


def attach_forward(step: Step, model: torch.nn.Module) -> list[Undo]:
    """Bracket the outermost module's forward, also when it raises. Evaluation mode is not training."""
    entered = 0

    def before(module: torch.nn.Module, inputs: Any) -> None:
        nonlocal entered
        if module.training:
            entered += 1
            step.forward.__enter__()

    def after(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        nonlocal entered
        if entered:
            entered -= 1
            step.forward.__exit__(None, None, None)

    return [
        model.register_forward_pre_hook(before).remove,
        model.register_forward_hook(after, always_call=True).remove,
    ]


def attach_optimizer(step: Step, optimizer: torch.optim.Optimizer, end: Callable[[], None] | None) -> list[Undo]:
    """Bracket `optimizer.step()`; a scaler that skips a step skips the end of the measured step with it."""

    def before(*_: Any) -> None:
        step.optimizer.__enter__()

    def after(*_: Any) -> None:
        step.optimizer.__exit__(None, None, None)
        if end is not None:
            end()

    return [optimizer.register_step_pre_hook(before).remove, optimizer.register_step_post_hook(after).remove]


def wrap_backward(step: Step) -> Undo:
    """Bracket every `loss.backward()` of the loop's thread."""
    original = torch.autograd.backward
    active = True

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if not active:
            return original(*args, **kwargs)
        with step.backward:
            return original(*args, **kwargs)

    torch.autograd.backward = backward

    def unwrap() -> None:
        nonlocal active
        active = False
        # Somebody may have wrapped ours since: then it stays, and passes everything through.
        if torch.autograd.backward is backward:
            torch.autograd.backward = original

    return unwrap
