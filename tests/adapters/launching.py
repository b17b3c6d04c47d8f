"""Ranks of a Megatron job for these tests: processes over gloo, with the stand-ins on their path."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np

from headrace.store import StoreWriter

HERE = Path(__file__).parent
PATIENCE_S = 900.0
"""Until ranks count as hung. On two loaded cores four still imported megatron-core after 100 s; a test took 459 s."""

JOB_TIMEOUT = timedelta(seconds=PATIENCE_S / 2)
"""Of torch.distributed: longer than a loaded machine takes to import, shorter than the patience."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank ended, and what it wrote."""

    status: int
    output: str
    errors: str


def run_ranks(
    script: Path, arguments: list[str], *, folder: Path, num_ranks: int = 2, adapter: bool = True, **environment: str
) -> list[Ended]:
    """Every rank to its end. Those that do not come to one are aborted, and their stacks are in their errors.

    Words like `only:1:--flag` are for that rank alone.
    """
    meeting = folder / f"meeting-{secrets.token_hex(4)}"
    runner = ["-m", "headrace.adapters.megatron"] if adapter else []
    ranks = []
    for rank in range(num_ranks):
        surroundings = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MEETING": str(meeting),
            "CACHE": str(folder / "cache"), "PYTHONPATH": f"{HERE / 'stand_in'}:{HERE.parents[1]}",
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment,
        }  # fmt: skip
        words = [word for word in arguments if not word.startswith("only:") or word.startswith(f"only:{rank}:")]
        words = [word.removeprefix(f"only:{rank}:") for word in words]
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-X", "faulthandler", *runner, str(script), *words],
                env=surroundings,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.send_signal(signal.SIGABRT)  # every thread's stack
        outputs = [rank.communicate() for rank in ranks]
    return [
        Ended(status=rank.returncode, output=output, errors=errors)
        for rank, (output, errors) in zip(ranks, outputs, strict=True)
    ]


def make_corpus(prefix: Path, *, num_documents: int = 60, vocab_size: int = 64, eod: int = 0, seed: int = 7) -> None:
    """Documents of 1 to 40 tokens, each with its end-of-document token; some are nothing else."""
    random = np.random.default_rng(seed)
    with StoreWriter(prefix, dtype=np.uint16) as writer:
        for _ in range(num_documents):
            length = int(random.integers(0, 40)) if random.random() < 0.8 else 0
            writer.add_document(np.append(random.integers(1, vocab_size, length), eod))
