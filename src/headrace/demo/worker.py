"""What a rank of the demo does, once rank.py has imported it.

The folder holds the work order; rank 0 leaves its results there, and a rank that fails its reason.
"""

from __future__ import annotations

import datetime
import os
import select
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from headrace.demo.blocks import alternate
from headrace.demo.corpus import source_of
from headrace.demo.deliveries import deliver_from_all
from headrace.demo.feeds import OpenFeed
from headrace.demo.losses import train_on_each
from headrace.demo.model import Training, write_model
from headrace.demo.progress import Progress
from headrace.demo.results import (
    CONTENDERS,
    FAILURE_FILES,
    ORDER_FILE,
    RESULTS_FILE,
    Failure,
    Measured,
    RankResults,
)
from headrace.demo.settings import BLOCK_ROUNDS, WARMUP_STEPS, DemoSettings, WorkOrder
from headrace.demo.traces import write_trace
from headrace.errors import HeadraceError
from headrace.shm.peers import open_pidfd

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=5)
LAST_WORDS_TIMEOUT = datetime.timedelta(seconds=3)
"""The launcher ends all ranks soon after the first one that fails: so long it waits until all have said why."""


def main() -> int:
    folder = Path(sys.argv[1])
    threading.Thread(target=_end_with_launcher, args=(os.getppid(),), daemon=True).start()
    rank = int(os.environ["RANK"])
    try:
        order = msgspec.json.decode((folder / ORDER_FILE).read_bytes(), type=WorkOrder)
        device = start_group()
        model_folder = folder / "model"
        num_parameters = write_model(model_folder, order.settings, order.corpus.vocab_size) if rank == 0 else 0
        dist.barrier()
        results = run(order, model_folder, rank, device)
        gathered: list[RankResults] | None = [results] * order.settings.tp if rank == 0 else None
        dist.gather_object(results, gathered)
        if gathered is not None:
            measured = Measured(
                ranks=gathered,
                num_parameters=num_parameters,
                device=str(device),
                backend=dist.get_backend(),
                num_threads=torch.get_num_threads(),
            )
            (folder / RESULTS_FILE).write_bytes(msgspec.json.encode(measured))
        dist.destroy_process_group()
    except Exception as error:
        report(error, folder, rank)
        return 1
    except KeyboardInterrupt:
        return 1  # whoever pressed the key knows
    return 0


def start_group() -> torch.device:
    """Join the other ranks: on accelerators where the launcher left them visible, else on the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.accelerator.set_device_index(local_rank)
    device = torch.device(accelerator.type, local_rank)
    dist.init_process_group(timeout=COLLECTIVE_TIMEOUT, device_id=device)
    return device


def run(order: WorkOrder, model_folder: Path, rank: int, device: torch.device) -> RankResults:
    """All parts of the demo on this rank."""
    settings, source = order.settings, source_of(order.corpus, order.settings)
    with Progress("begin", num_steps(settings), visible=rank == 0) as progress:
        progress.begin("load the model")
        losses = train_on_each(source, model_folder, num_steps=settings.loss_steps, device=device, progress=progress)
        training = Training(model_folder)
        feeds = [OpenFeed(name, source, device) for name in CONTENDERS]
        deliveries = deliver_from_all(
            feeds,
            training,
            num_steps=settings.steps,
            num_warmup_steps=WARMUP_STEPS,
            device=device,
            progress=progress,
        )
        blocks = alternate(
            feeds,
            training,
            num_rounds=BLOCK_ROUNDS,
            num_steps=settings.block_steps,
            device=device,
            progress=progress,
        )
        if settings.trace_dir is not None:
            write_trace(feeds[CONTENDERS.index("headrace")], training, settings, device=device, progress=progress)
        for feed in feeds:
            feed.close()
    return RankResults(losses=losses, deliveries=deliveries, blocks=blocks)


def num_steps(settings: DemoSettings) -> int:
    """Training steps of a whole run, for its progress bar."""
    per_feed = settings.loss_steps + BLOCK_ROUNDS * settings.block_steps
    traced = settings.num_traced_steps if settings.trace_dir is not None else 0
    return len(CONTENDERS) * per_feed + WARMUP_STEPS + settings.steps + traced


def report(error: Exception, folder: Path, rank: int) -> None:
    """Say in one line what happened, leave it to the launcher in full, and let the other ranks do the same."""
    lines = str(error).splitlines() or [""]
    # One write, so that the lines of two ranks do not run into each other.
    os.write(sys.stderr.fileno(), f"{type(error).__name__}: {lines[0]}\n".encode())
    expected = isinstance(error, HeadraceError)
    failure = Failure(
        rank=rank,
        kind=type(error).__name__,
        message=str(error),
        traceback="" if expected else "".join(traceback.format_exception(error)),
        at_ns=time.time_ns(),
    )
    (folder / FAILURE_FILES.format(rank=rank)).write_bytes(msgspec.json.encode(failure))
    with suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        store.set(f"failed/{rank}", "")
        store.wait([f"failed/{other}" for other in range(dist.get_world_size())], LAST_WORDS_TIMEOUT)


def _end_with_launcher(launcher: int) -> None:
    """Ranks have a session of their own: the death of the launcher would not reach them."""
    pidfd = open_pidfd(launcher)
    if pidfd is not None and os.getppid() == launcher:
        select.select([pidfd], [], [])
        os._exit(1)
