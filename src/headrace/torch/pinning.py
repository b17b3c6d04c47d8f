"""Telling a device's driver about the ring's memory, so that copies from it run at full speed and beside the host.

One function per backend. What cannot be pinned is copied unpinned, with a note that says why: slower, never wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("headrace")

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of this process


@dataclass(frozen=True, kw_only=True, slots=True)
class Pinning:
    """The outcome of `pin`. Undo it before the memory is unmapped, and when no copy from it is under way."""

    is_pinned: bool
    note: str
    undo: Callable[[], None]


def pin(address: int, nbytes: int, device_type: str) -> Pinning:
    """Register host memory with the driver of `device_type` ("cuda", "npu"). Never raises; blocks while it registers.

    `address` and `nbytes` are multiples of 64 KiB, which Ascend asks for; the ring's segments are.
    """
    try:
        if device_type == "cuda":
            return _pin_cuda(address, nbytes)
        if device_type == "npu":
            return _pin_npu(address, nbytes)
        return _unpinned(f"no way to pin memory for {device_type} is known")
    except Exception as error:
        return _unpinned(f"pinning for {device_type} failed: {error}")


def _unpinned(note: str) -> Pinning:
    log.warning("host memory stays unpinned, copies to the device will be slower: %s", note)
    return Pinning(is_pinned=False, note=note, undo=lambda: None)


def _pin_cuda(address: int, nbytes: int) -> Pinning:
    runtime: Any = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(address, nbytes, _PORTABLE))
    if status != 0:
        _clear_cuda_error()
        return _unpinned(f"cudaHostRegister of {nbytes:,} bytes returned {status}; is `ulimit -l` large enough?")

    def undo() -> None:
        if int(runtime.cudaHostUnregister(address)) != 0:
            _clear_cuda_error()

    return Pinning(is_pinned=True, note=f"{nbytes:,} bytes registered", undo=undo)


def _clear_cuda_error() -> None:
    """A failed call leaves its error for the next one to trip over, which would be the user's. PyTorch does not export
    cudaGetLastError, so it is fetched from the runtime that is loaded already, never from another one."""
    with contextlib.suppress(OSError, AttributeError):
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
        for path in loaded:
            ctypes.CDLL(path).cudaGetLastError()


def _pin_npu(address: int, nbytes: int) -> Pinning:
    """By name: torch_npu is never imported here, it is there when the user has an NPU tensor at all."""
    runtime: Any = torch.get_device_module("npu").npurt()
    status = int(runtime.npuHostRegister(address, nbytes))
    if status != 0:
        return _unpinned(f"npuHostRegister of {nbytes:,} bytes returned {status}")
    return Pinning(is_pinned=True, note=f"{nbytes:,} bytes registered", undo=lambda: runtime.npuHostUnregister(address))
