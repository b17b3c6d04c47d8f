"""Ranks of a Megatron job for these tests: processes over gloo, with the stand-ins on their path."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.store import StoreWriter

HERE = Path(__file__).parent
PATIENCE_S = 140.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank ended, and what it wrote."""

    status: int
    output: str
    errors: str


def run_ranks(
    script: Path, arguments: list[str], *, folder: Path, num_ranks: int = 2, adapter: bool = True, **environment: str
) -> list[Ended]:
    """Every rank to its end; those that do not end are killed and fail the test. `{rank}` in arguments is replaced."""
    meeting = folder / f"meeting-{secrets.token_hex(4)}"
    runner = ["-m", "headrace.adapters.megatron"] if adapter else []
    ranks = []
    for rank in range(num_ranks):
        own = {name: value.replace("{rank}", str(rank)) for name, value in environment.items()}
        surroundings = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MEETING": str(meeting),
            "CACHE": str(folder / "cache"), "PYTHONPATH": f"{HERE / 'stand_in'}:{HERE.parents[1]}",
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **own,
        }  # fmt: skip
        words = [word for word in arguments if not word.startswith("only:") or word.startswith(f"only:{rank}:")]
        words = [word.removeprefix(f"only:{rank}:") for word in words]
        ranks.append(
            subprocess.Popen(
                [sys.executable, *runner, str(script), *words],
                env=surroundings,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [
        Ended(status=rank.returncode, output=output, errors=errors)
        for rank, (output, errors) in zip(ranks, outputs, strict=True)
    ]


def make_corpus(prefix: Path, *, num_documents: int = 60, vocab_size: int = 64, eod: int = 0) -> None:
    """Documents of 1 to 40 tokens, each with its end-of-document token; some are nothing else."""
    random = np.random.default_rng(7)
    with StoreWriter(prefix, dtype=np.uint16) as writer:
        for _ in range(num_documents):
            length = int(random.integers(0, 40)) if random.random() < 0.8 else 0
            writer.add_document(np.append(random.integers(1, vocab_size, length), eod))
