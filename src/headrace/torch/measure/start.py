"""Five lines in a training loop: find out what runs here, install what can be installed, and hand back a `Run`."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist

from headrace.errors import ConfigError
from headrace.measure.environment import capture_environment
from headrace.measure.flops import Attention, ModelShape, Recompute, check_attention, check_recompute
from headrace.measure.model_config import shape_from_transformers
from headrace.measure.peaks import peak_flops as listed_peak
from headrace.measure.record import RunFacts, new_run_id
from headrace.measure.run import LogMetrics, Run
from headrace.measure.sense import above_zero, whole_at_least
from headrace.measure.step import Step
from headrace.torch.measure.collectives import communication_unseen, wrap_collectives
from headrace.torch.measure.devices import DeviceBackend, backend_of
from headrace.torch.measure.gather import GlooGather
from headrace.torch.measure.hooks import attach


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """How the job is divided. Ranks that differ in `data_rank` train different samples; all others share theirs."""

    data_rank: int = 0
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in self.__slots__ if name != "data_rank"}
        whole_at_least(1, **sizes)
        whole_at_least(0, data_rank=self.data_rank)
        if not 0 <= self.data_rank < self.data_parallel_size:
            raise ConfigError(
                f"data_rank lies below data_parallel_size, got {self.data_rank} of {self.data_parallel_size}"
            )

    @property
    def num_devices(self) -> int:
        """Devices of the whole job."""
        shared = self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size
        return self.data_parallel_size * shared


class Description(TypedDict, total=False):
    """What runs. Everything defaults to what the model and the tables say; what they do not say is None."""

    device: torch.device | str
    parallel: Parallel
    """Needed when not every rank trains its own samples."""
    shape: ModelShape
    attention: Attention
    """Whether half of each attention square is counted ("causal", the default) or all of it ("full")."""
    recompute: Recompute
    dtype: str
    """What is computed in, for the peak: under autocast not the parameters' dtype."""
    peak_flops: float
    sequence_length: int
    warmup_steps: int
    """Steps that are recorded but count in no figure (allocator, autotuning, compilation). Default 3."""
    label: str
    run_id: str


def start(
    model: torch.nn.Module | None = None,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    records: Path | str | None = None,
    log_every: int = 10,
    log_metrics: LogMetrics | None = None,
    print_line: Callable[[str], None] | None = print,
    communication: bool = False,
    slow_rank: bool = False,
    groups: Sequence[Sequence[int]] | None = None,
    end_with_optimizer: bool = True,
    **description: Unpack[Description],
) -> Run:
    """Begin to measure the training loop of this process.

    With `model` and `optimizers` the phases forward, backward and optimizer are hooked, and the measured step ends
    behind the last optimizer's step (unless `end_with_optimizer` is off); without them use the spans of `run.step` and
    call `run.end()`. `communication` wraps the collectives of torch.distributed; `slow_rank` needs it too, and compares
    the ranks inside each of `groups`. Every rank writes its `records`; `log_metrics` and `print_line` are called on
    rank 0 only.

    A collective call when torch.distributed is initialised (all ranks start together). Afterwards nothing synchronises
    or waits, and nothing but this call raises. Raises ConfigError for a device that is not there or sizes that do not
    make up the job, OSError when `records` cannot be written.
    """
    facts = describe(model, **description)
    backend = backend_of(description.get("device") or device_of(model))
    unseen = communication_unseen(model, wrapped=communication, pipeline_parallel_size=facts.pipeline_parallel_size)
    gather = GlooGather() if slow_rank and facts.world_size > 1 else None
    run = Run(
        facts,
        step=step_on(backend, {} if unseen is None else {"communication": unseen}),
        records=None if records is None else Path(records),
        log_every=log_every,
        log_metrics=log_metrics if facts.rank == 0 else None,
        print_line=print_line if facts.rank == 0 else None,
        read_device_memory=backend.read_memory if backend.asynchronous else None,
        gather=gather,
        groups=groups,
    )
    if communication:
        run.at_close.append(wrap_collectives(run.step))
    elif facts.world_size == 1:
        run.step.observe("communication")  # nobody to talk to: there is none, and that is known
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    run.at_close.append(attach(run.step, model, listed, end=run.end if end_with_optimizer else None))
    if gather is not None:
        run.at_close.append(gather.close)
    if records is not None:
        run.at_close.append(save_at_exit(run))
    run.step.begin()
    return run


def save_at_exit(run: Run) -> Callable[[], None]:
    """The last steps of a training that ends in an exception are the interesting ones. Returns what takes it back."""
    owner = os.getpid()

    def save() -> None:
        if os.getpid() == owner:  # a forked child holds a copy of the unwritten lines
            run.save()

    atexit.register(save)
    return lambda: atexit.unregister(save)


def describe(model: torch.nn.Module | None = None, **description: Unpack[Description]) -> RunFacts:
    """The facts of the run, from what is said and what can be found out. A collective call inside a job."""
    backend = backend_of(description.get("device") or device_of(model))
    rank, world_size = own_rank_and_world()
    parallel = description.get("parallel") or every_rank_its_own_samples(model, rank, world_size)
    if parallel.num_devices != world_size:
        raise ConfigError(
            f"the parallel sizes make {parallel.num_devices} devices, the job has {world_size}: {parallel}"
        )
    check_description(**description)
    dtype = description.get("dtype") or dtype_of(model)
    name = backend.name()
    return RunFacts(
        run=description.get("run_id") or shared_run_id(),
        rank=rank,
        world_size=world_size,
        data_rank=parallel.data_rank,
        data_parallel_size=parallel.data_parallel_size,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        num_nodes=num_nodes(world_size),
        device=backend.kind,
        device_name=name,
        dtype=dtype,
        peak_flops=description.get("peak_flops") or (listed_peak(name, dtype) if name and dtype else None),
        sequence_length=description.get("sequence_length"),
        attention=description.get("attention", "causal"),
        recompute=description.get("recompute", "none"),
        model=None if model is None else type(model).__name__,
        num_parameters=num_parameters(model),
        shape=description.get("shape") or shape_of(model),
        warmup_steps=description.get("warmup_steps", 3),
        label=description.get("label"),
        started_unix_s=time.time(),
        environment=capture_environment(),
    )


def check_description(**description: Unpack[Description]) -> None:
    """ConfigError for a value that cannot be: said at the start, since nothing is raised later."""
    check_attention(description.get("attention", "causal"))
    check_recompute(description.get("recompute", "none"))
    whole_at_least(0, warmup_steps=description.get("warmup_steps", 0))
    if (length := description.get("sequence_length")) is not None:
        whole_at_least(1, sequence_length=length)
    peak = description.get("peak_flops")
    if peak is not None and not above_zero(peak):
        raise ConfigError(f"peak_flops are operations per second of one device, above 0, got {peak}")


def num_parameters(model: torch.nn.Module | None) -> int | None:
    """Parameters of this rank's part of the model; None without one, or before a lazy one ran."""
    if model is None or any(torch.nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        return None
    return sum(parameter.numel() for parameter in model.parameters())


def every_rank_its_own_samples(model: torch.nn.Module | None, rank: int, world_size: int) -> Parallel:
    """Plain data parallelism, unless the model knows better: counting shared samples per rank would invent some."""
    tensor_parallel_size = getattr(model, "tp_size", None)
    if world_size > 1 and isinstance(tensor_parallel_size, int) and tensor_parallel_size > 1:
        raise ConfigError(
            f"the model is tensor parallel over {tensor_parallel_size} ranks, which share their samples: pass "
            f"parallel=Parallel(tensor_parallel_size={tensor_parallel_size}, data_rank=..., data_parallel_size=...)"
        )
    return Parallel(data_rank=rank, data_parallel_size=world_size)


def step_on(backend: DeviceBackend, unseen: dict[str, str]) -> Step:
    """A step whose device times come from the backend's events, where it has them."""
    if not backend.asynchronous:
        return Step(unseen=unseen)
    if backend.blind is not None:
        return Step(blind=backend.blind, unseen=unseen)
    return Step(new_event=backend.new_event, unseen=unseen)


def own_rank_and_world() -> tuple[int, int]:
    """(rank, world size) of this process, (0, 1) outside of a job."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def shared_run_id() -> str:
    """A new run id, rank 0's on all ranks."""
    ids: list[Any] = [new_run_id()]
    if own_rank_and_world()[1] > 1:
        dist.broadcast_object_list(ids, src=0)
    return str(ids[0])


def num_nodes(world_size: int) -> int | None:
    """Hosts of the job by torchrun's environment; None when it does not tell."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if world_size == 1:
        return 1
    return world_size // int(local) if local.isdigit() and int(local) and world_size % int(local) == 0 else None


def device_of(model: torch.nn.Module | None) -> torch.device:
    """Where the model's first parameter lies; the CPU without a model."""
    parameter = None if model is None else next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def dtype_of(model: torch.nn.Module | None) -> str | None:
    """The model's first parameter's dtype, as "bfloat16". Under autocast pass the dtype that is computed in."""
    parameter = None if model is None else next(model.parameters(), None)
    return None if parameter is None else str(parameter.dtype).removeprefix("torch.")


def shape_of(model: torch.nn.Module | None) -> ModelShape | None:
    """The shape of a transformers model; None where its configuration cannot be counted."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    try:
        return shape_from_transformers(config)
    except ConfigError:
        return None
