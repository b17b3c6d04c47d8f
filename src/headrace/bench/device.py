"""The last metre, measured on an accelerator: body of `headrace bench device`. Under four minutes on one device.

    copy          a slot of the ring (memfd, registered) to the device, beside a pinned and an unpinned torch copy
    registration  how long the driver takes to pin a ring
    get_batch     headrace.torch.Feed(device=...) beside a DataLoader whose fields are copied one by one and whose
                  number of boundaries is read back, as the broadcast's receivers do: time of the host in the call, and
                  until the batch is on the device
    syncs         host-device synchronisations per step of the feed (CUDA counts them)

Isolates: one process, the batches ready. Held fixed: the same bytes, rotating slots, warm-up left out.
How it can mislead: a copy alone is not a copy beside computation; one rank of one device says nothing of several that
share a PCIe switch. A broadcast between two ranks needs two devices: NCCL refuses to share one.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.bench.corpus import write_synthetic
from headrace.errors import ConfigError
from headrace.feed.packed_tokens import PackedTokens
from headrace.measure.environment import capture_environment
from headrace.measure.statistics import median, p99
from headrace.shm import segment
from headrace.torch.contenders import ReplicatedFeed
from headrace.torch.feed import Feed
from headrace.torch.pinning import pin

RECORD_VERSION = 1
ISOLATES = "one process, batches ready, rotating slots, no computation beside"
# What a slot of 1 x 4096, 1 x 32768 and 1 x 131072 tokens holds, and one of a large micro batch.
COPIED_BYTES = (131_072, 1 << 20, 4 << 20, 64 << 20)
NUM_SLOTS = 4


def run(*, device: str = "cuda", num_copies: int = 200, num_steps: int = 200, seq_length: int = 4096) -> dict[str, Any]:
    """Measure and return the JSON-able record. ConfigError where there is no such device."""
    target = torch.device(device)
    require_device(target)
    rows = [row for nbytes in COPIED_BYTES for row in copies(target, nbytes, num_copies)]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-device-") as folder:
        prefix = str(Path(folder) / "corpus")
        write_synthetic(prefix, num_tokens=(num_steps + 40) * 2 * seq_length, seed=1)
        source = PackedTokens(prefix, seq_length=seq_length)
        rows += get_batches(target, source, num_steps)
        syncs = syncs_per_step(target, source, num_steps) if target.type == "cuda" else None
    by_name = {(row["what"], row["contender"], row.get("nbytes")): row for row in rows}
    largest = COPIED_BYTES[-1]
    return {
        "version": RECORD_VERSION,
        "isolates": ISOLATES,
        "environment": asdict(capture_environment()) | {"device": device_name(target)},
        "rows": rows,
        "registration": registration(target),
        "skipped": {"nccl broadcast": "two ranks need two devices: NCCL refuses to share one"},
        "summary": {
            "slot_gb_per_s": by_name["copy", "slot of the ring", largest]["gb_per_s"],
            "pinned_gb_per_s": by_name["copy", "pinned tensor", largest]["gb_per_s"],
            "unpinned_gb_per_s": by_name["copy", "unpinned tensor", largest]["gb_per_s"],
            "syncs_per_step": syncs,
        },
    }


def require_device(device: torch.device) -> None:
    """ConfigError unless the device is there."""
    try:
        available = device.type != "cpu" and torch.get_device_module(device).is_available()
    except (RuntimeError, AttributeError):
        available = False
    if not available:
        raise ConfigError(f"there is no device {str(device)!r} here; name an accelerator that torch sees with --device")


def device_name(device: torch.device) -> str:
    """As its backend calls it."""
    return str(torch.get_device_module(device).get_device_name(device))


def copies(device: torch.device, nbytes: int, num_copies: int) -> list[dict[str, Any]]:
    """The three ways of holding the bytes on the host, in turns."""
    mapping, undo = registered_ring(device, NUM_SLOTS * nbytes)
    ring = torch.from_numpy(segment.memory(mapping))
    hosts = {
        "slot of the ring": [ring[i * nbytes : (i + 1) * nbytes] for i in range(NUM_SLOTS)],
        "pinned tensor": [torch.zeros(nbytes, dtype=torch.uint8).pin_memory() for _ in range(NUM_SLOTS)],
        "unpinned tensor": [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(NUM_SLOTS)],
    }
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    values: dict[str, list[float]] = {name: [] for name in hosts}
    synchronize = torch.get_device_module(device).synchronize
    for number in range(num_copies + 10):
        for name, slots in hosts.items():
            synchronize()
            start = time.perf_counter_ns()
            target.copy_(slots[number % NUM_SLOTS], non_blocking=True)
            synchronize()
            values[name].append((time.perf_counter_ns() - start) / 1e3)
    undo()
    return [_row("copy", name, taken[10:], nbytes=nbytes) for name, taken in values.items()]


def registered_ring(device: torch.device, nbytes: int) -> tuple[Any, Callable[[], None]]:
    """A segment as the ring's, pinned if the driver lets us; and how to undo that."""
    fd = segment.create("headrace-bench", nbytes, knob="the size")
    mapping = segment.attach(fd, writable=True, knob="the size", populate=True)
    os.close(fd)
    pinning = pin(mapping.address, mapping.nbytes, device.type)
    return mapping, pinning.undo


def registration(device: torch.device) -> list[dict[str, Any]]:
    """How long pinning takes, by size."""
    found = []
    for nbytes in (16 << 20, 256 << 20):
        fd = segment.create("headrace-bench", nbytes, knob="the size")
        mapping = segment.attach(fd, writable=True, knob="the size", populate=True)
        os.close(fd)
        start = time.perf_counter_ns()
        pinning = pin(mapping.address, mapping.nbytes, device.type)
        taken_ms = (time.perf_counter_ns() - start) / 1e6
        pinning.undo()
        found.append({"nbytes": nbytes, "is_pinned": pinning.is_pinned, "note": pinning.note, "ms": taken_ms})
    return found


def get_batches(device: torch.device, source: PackedTokens, num_steps: int) -> list[dict[str, Any]]:
    """Host time of the call, and until the batch is on the device; one contender after the other, twice around."""
    synchronize = torch.get_device_module(device).synchronize
    rows = []
    for name, batches in (("headrace", feed_batches), ("loader and copies", loaded_batches)):
        host_us, complete_us = [], []
        iterator = batches(device, source)
        for _ in range(num_steps):
            synchronize()
            start = time.perf_counter_ns()
            next(iterator)
            host_us.append((time.perf_counter_ns() - start) / 1e3)
            synchronize()
            complete_us.append((time.perf_counter_ns() - start) / 1e3)
            time.sleep(0.005)  # a short step, in which the writer gets ahead: pacing, not waiting
        iterator.close()
        rows += [
            _row("get_batch, host", name, host_us[10:]),
            _row("get_batch, on the device", name, complete_us[10:]),
        ]
    return rows


def feed_batches(device: torch.device, source: PackedTokens) -> Generator[Any, None, None]:
    """What headrace hands out."""
    with Feed(source, device=device) as feed:
        yield from feed


def loaded_batches(device: torch.device, source: PackedTokens) -> Generator[Any, None, None]:
    """Field by field, the number of boundaries read back as by the broadcast's receivers."""
    loader = ReplicatedFeed(source)
    try:
        for item in loader:
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in item.items()}
            int(torch.tensor(item["cu_seqlens"].numel(), device=device).item())
            yield batch
    finally:
        loader.close()


def syncs_per_step(device: torch.device, source: PackedTokens, num_steps: int) -> float:
    """What CUDA counts as a wait of the host for the device, in the feed's own steps."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught, Feed(source, device=device) as feed:
            warnings.simplefilter("always")
            for _ in range(num_steps):
                next(feed)
            return sum("synchroniz" in str(warning.message) for warning in caught) / num_steps
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _row(what: str, contender: str, values_us: list[float], *, nbytes: int | None = None) -> dict[str, Any]:
    middle = median(values_us)
    row = {"what": what, "contender": contender, "median_us": middle, "p99_us": p99(values_us), "values_us": values_us}
    if nbytes is not None:
        row |= {"nbytes": nbytes, "gb_per_s": nbytes / np.float64(middle) / 1e3}
    return row
