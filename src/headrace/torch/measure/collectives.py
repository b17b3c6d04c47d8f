"""Exposed communication: a wrapper around torch.distributed's functions, where the user allows one.

A blocking call counts as a whole; an asynchronous one counts where its result is waited for. On the host's clock that
is the time the loop stood still, on the device's the time its stream was held. DTensor waits through
`torch.distributed._functional_collectives.wait_tensor`, which is wrapped as well.

Not seen, and then said: collectives issued below Python (DDP's reducer, FSDP's streams), by other threads (on a GPU
autograd runs backward hooks in its own), and point-to-point calls of pipeline schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from headrace.measure.step import NOBODY, Step
from headrace.torch.measure.hooks import Undo

# isend and irecv are left alone: P2POp compares them by identity, so a wrapped one would make batch_isend_irecv fail.
WRAPPED = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list",
    "send",
)  # fmt: skip

OTHER_THREADS = "collectives were issued by other threads (autograd's): their waits cannot be seen"


class TimedWork:
    """A handle of an asynchronous collective whose `wait` counts as communication. Everything else passes through."""

    __slots__ = ("_step", "_work")

    def __init__(self, work: Any, step: Step) -> None:
        self._work, self._step = work, step

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait as the wrapped handle does, on the clock."""
        return timed(self._step, self._work.wait, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def timed(step: Step, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run `call` as communication of the running step, or mark the step's communication as incomplete."""
    if step.owner not in (NOBODY, get_ident()):
        step.spoil("communication", OTHER_THREADS)
        return call(*args, **kwargs)
    with step.communication:
        return call(*args, **kwargs)


def wrap_collectives(step: Step) -> Undo:
    """Wrap the collectives of torch.distributed for the whole process; returns what takes the wrappers off again.

    Names imported earlier with `from torch.distributed import ...` keep the unwrapped function. `torch.compile` may
    break its graph at a wrapped call inside a compiled region.
    """
    undo = [wrap(step, name, (dist, c10d)) for name in WRAPPED if hasattr(dist, name)]
    functional = getattr(dist, "_functional_collectives", None)
    if functional is not None and hasattr(functional, "wait_tensor"):
        undo.append(wrap(step, "wait_tensor", (functional,)))
    step.observe("communication")

    def remove() -> None:
        while undo:
            undo.pop()()

    return remove


def wrap(step: Step, name: str, namespaces: Iterable[Any]) -> Undo:
    """Put one timed function in place of `name` wherever it is looked up."""
    places = [place for place in namespaces if hasattr(place, name)]
    original = getattr(places[0], name)
    active = True

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if not active:
            return original(*args, **kwargs)
        return with_timed_waits(timed(step, original, args, kwargs), step)

    for place in places:
        setattr(place, name, collective)

    def unwrap() -> None:
        nonlocal active
        active = False
        for place in places:
            if getattr(place, name) is collective:
                setattr(place, name, original)

    return unwrap


def with_timed_waits(result: Any, step: Step) -> Any:
    """Handles become timed ones; tensors and None stay what they are."""
    if isinstance(result, list):
        return [with_timed_waits(one, step) for one in result]
    if result is None or isinstance(result, torch.Tensor) or not hasattr(result, "wait"):
        return result
    return TimedWork(result, step)


def communication_unseen(model: torch.nn.Module | None, *, wrapped: bool, pipeline_parallel_size: int) -> str | None:
    """Why the wrapper cannot see this model's communication completely; None when it can (or none is installed)."""
    if not wrapped:
        return None
    if pipeline_parallel_size > 1:
        return "the pipeline's point-to-point calls are not wrapped"
    for module in () if model is None else model.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "DistributedDataParallel" in kinds:
            return "DistributedDataParallel issues its collectives below Python: use a profiler and `headrace analyze`"
        if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
            return "FSDP waits on streams, not on handles: use a profiler and `headrace analyze`"
    return None
