"""A real client: GPTDataset, GPTModel and Megatron's schedules (megatron-core 0.16.1), TP=2 over gloo.

The losses are compared bit by bit: broadcast, through shared memory, and through shared memory after a rank was killed
and the job continued from its checkpoint. Validation has an iterator of its own and takes turns with training.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.adapters.launching import HERE, make_corpus, run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is a test dependency")

CLIENT = HERE / "client.py"
FLAGS = [
    "--tensor-model-parallel-size=2",
    "--micro-batch-size=2",
    "--global-batch-size=4",
    "--train-iters=6",
    "--eval-iters=1",
    "--eval-interval=2",
    "--split=80,20,0",
    "--reset-attention-mask",
    "--reset-position-ids",
    "--eod-mask-loss",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    make_corpus(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def broadcast_losses(place) -> list[str]:
    first, second = run_ranks(CLIENT, [*FLAGS, "--data-path", str(place / "corpus")], folder=place, adapter=False)
    assert first.status == second.status == 0, first.errors + second.errors
    lines = losses(first.output)
    assert [line.split()[:2] for line in lines if line.startswith("valid")] == [["valid", n] for n in "135"]
    assert len(lines) == 9
    return lines


def losses(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.split(" ")[0] in ("train", "valid")]


def test_killed_and_continued_it_has_the_losses_of_the_broadcast(place, broadcast_losses):
    saved = place / "saved"
    saved.mkdir()
    arguments = [*FLAGS, "--data-path", str(place / "corpus"), "--save", str(saved), "--enable-share-memory"]
    first, second = run_ranks(CLIENT, arguments, folder=place, CLIENT_DIES_AT="3")
    assert second.status == -signal.SIGKILL
    # Rank 0 hears of the death from the ring or from gloo, whichever it waits for.
    assert first.status == 1, first.errors
    assert "PeerGone" in first.errors or "Connection" in first.errors, first.errors
    assert losses(first.output) == broadcast_losses[:4], "three steps and a validation"
    # The checkpoint of step 2 continues on a Megatron that keeps its batch path in the other place.
    first, second = run_ranks(CLIENT, arguments, folder=place, HEADRACE_STAND_IN="core")
    assert first.status == second.status == 0, first.errors + second.errors
    assert losses(first.output) == broadcast_losses[3:]
