"""A job of two ranks as torchrun would start it, without torchrun: no second interpreter, no agent, no restart."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 140.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank ended, and what it wrote."""

    status: int
    output: str
    errors: str


def run_job(script: Path, arguments: list[str], *, folder: Path, path: str = str(ROOT), size: int = 2) -> list[Ended]:
    """Every rank to its end; one that comes to none is aborted, and its stacks are in its errors."""
    shared = {
        **os.environ, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "MEETING": str(folder / f"meeting-{secrets.token_hex(4)}"), "PYTHONPATH": path, "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(script), *arguments],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.send_signal(signal.SIGABRT)
        outputs = [rank.communicate() for rank in ranks]
    return [
        Ended(status=rank.returncode, output=output, errors=errors)
        for rank, (output, errors) in zip(ranks, outputs, strict=True)
    ]


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port
