"""One process per rank through torch's elastic launcher, and nothing left of them, however they end."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from headrace.demo.processes import PROC, wait_until_gone
from headrace.demo.results import Failure
from headrace.errors import ConfigError, FormatError, HeadraceError

MARK = "HEADRACE_DEMO_RUN"
"""Every process of a run inherits this variable: that is how the last ones are found."""
RANK_STOP_TIMEOUT_S = 5
"""A rank inside a collective does not hear SIGTERM: after this it is killed."""
LEFTOVER_TIMEOUT_S = 1.0
"""DataLoader workers look for their rank every 5 s only; they are not waited for that long."""

_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(folder: Path, *, tp: int) -> None:
    """Run `headrace.demo.rank FOLDER` on `tp` ranks; blocks until all have ended, helpers included.

    The first rank's error if one failed: ConfigError and FormatError as they are, else a HeadraceError that names rank
    and cause. KeyboardInterrupt or SystemExit if a signal ended the run.
    """
    mark = secrets.token_hex(8)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=tp,
        run_id=mark,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        # The machine's own name may not resolve, and this run never leaves the machine.
        local_addr="localhost",
        max_restarts=0,
        shutdown_timeout=RANK_STOP_TIMEOUT_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )
    _silence_launcher()
    with _environment(_rank_environment(mark, tp, folder)), _signal_handlers_restored():
        try:
            elastic_launch(config, sys.executable)("-m", "headrace.demo.rank", str(folder))
        except ChildFailedError as error:
            raise _cause(error, folder) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + int(error.sigval)) from None
        finally:
            _end_leftovers(mark)


def _rank_environment(mark: str, tp: int, folder: Path) -> dict[str, str]:
    num_cores = len(os.sched_getaffinity(0))
    # Two ranks on one accelerator is what no collective library wants: then all compute on the CPU.
    too_few = torch.accelerator.is_available() and torch.accelerator.device_count() < tp
    return (dict.fromkeys(_VISIBLE_DEVICES, "") if too_few else {}) | {
        MARK: mark,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores // tp))),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # Nothing is downloaded, and modules in the current folder are not taken for those of a package.
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",
        # torch makes this folder when it is imported, and leaves it.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        # A rank that waits for a slower one is no news, nor that a profiler starts and stops.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99"),
    }


def _silence_launcher() -> None:
    """It reports failures in long frames of its own; what the ranks wrote says more. Each logger has its own level."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _cause(error: ChildFailedError, folder: Path) -> HeadraceError:
    """The error to show: what the caller can correct, else the first that happened."""
    reports = [msgspec.json.decode(path.read_bytes(), type=Failure) for path in folder.glob("failure-*.json")]
    for kind in (ConfigError, FormatError):
        for report in reports:
            if report.kind == kind.__name__:
                return kind(report.message)
    rank, ended = error.get_first_failure()
    if ended.exitcode < 0 and all(report.rank != rank for report in reports):
        return HeadraceError(
            f"rank {rank} (pid {ended.pid}) was ended by {signal.Signals(-ended.exitcode).name}; "
            "if nobody sent it, the machine was out of memory: lower seq_length or micro_batch_size"
        )
    if not reports:
        return HeadraceError(f"rank {rank} (pid {ended.pid}) ended with exit code {ended.exitcode} and said nothing")
    first = min(reports, key=lambda report: report.at_ns)
    return HeadraceError(f"rank {first.rank} failed with {first.kind}: {first.message}\n{first.traceback}".rstrip())


def _end_leftovers(mark: str) -> None:
    for pid in wait_until_gone(_marked(mark), timeout_s=LEFTOVER_TIMEOUT_S):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until_gone(_marked(mark), timeout_s=LEFTOVER_TIMEOUT_S)


def _marked(mark: str) -> list[int]:
    entry = f"{MARK}={mark}".encode()
    marked = []
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    marked.append(int(folder.name))
    return marked


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """The launcher starts ranks with this process's environment."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """The launcher installs handlers and leaves them."""
    before = {number: signal.getsignal(number) for number in _HANDLED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(ValueError):  # not in the main thread: nothing was installed either
                signal.signal(number, handler)
