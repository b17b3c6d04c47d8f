"""megatron-core's GPTModel on a machine without a GPU: what it asks of CUDA is answered for the CPU.

Megatron asks `torch.cuda.current_device()` where to put things and keeps CUDA's random state for dropout; both have a
CPU answer. Same idea as torch_npu.contrib.transfer_to_npu, which answers for another device.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

CPU = torch.device("cpu")


def install() -> None:
    """Before megatron.core is used. For a process that does nothing else."""
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment, return-value]
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment, return-value]
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.Tensor.cuda = _itself  # type: ignore[method-assign, assignment]
    torch.nn.Module.cuda = _itself  # type: ignore[method-assign, assignment]
    for name in ("zeros", "ones", "empty", "tensor", "full", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _on_cpu(factory: Any) -> Any:
    """The schedules count tokens with `device="cuda"`."""

    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def _itself(thing: Any, *_: Any, **__: Any) -> Any:
    return thing
