"""Lightning Fabric with tensor parallelism over two real ranks, fed by one feeder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace import PackedTokens
from headrace.store import vocab_size_of
from tests.adapters.launching import make_corpus
from tests.adapters.test_transformers_trainer import EXAMPLES, example
from tests.sources.job import run_job

pytest.importorskip("lightning_fabric", reason="needs lightning-fabric")
STEPS = 5


def test_two_ranks_train_on_the_batches_of_one_feed(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    make_corpus(corpus, vocab_size=1000)
    assert vocab_size_of(corpus) > 512, "more ids than a number in the example would allow for"
    ended = run_job(EXAMPLES / "feed_fabric.py", [str(corpus), "--steps", str(STEPS)], folder=tmp_path)
    assert [one.status for one in ended] == [0, 0], ended[0].errors + ended[1].errors
    said = re.search(r"(\d+) steps, loss ([\d.]+) to ([\d.]+)", ended[0].output)
    assert said is not None, ended[0].output
    expected = learnt_alone(corpus)
    assert int(said[1]) == STEPS
    assert (float(said[2]), float(said[3])) == pytest.approx((expected[0], expected[-1]), abs=2e-3)


def learnt_alone(corpus: Path) -> list[float]:
    """The same model on the same batches, in one process and without a feed."""
    torch = pytest.importorskip("torch")
    batches = PackedTokens(str(corpus), seq_length=64, micro_batch_size=2, num_epochs=1000).open_batches()
    torch.manual_seed(0)
    model = example("feed_fabric").Model(vocab_size_of(corpus))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for index in range(STEPS):
        batch = {name: torch.from_numpy(batches[index][name]).flatten() for name in ("tokens", "labels", "loss_mask")}
        each = torch.nn.functional.cross_entropy(model(batch["tokens"]), batch["labels"], reduction="none")
        loss = (each * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
