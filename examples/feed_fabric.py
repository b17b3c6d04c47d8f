"""Train with Lightning Fabric and tensor parallelism, fed by headrace: both ranks take one batch, which is read once.

    torchrun --nproc-per-node 2 examples/feed_fabric.py CORPUS [--steps 20]

Fabric's own way is `setup_dataloaders`, where every rank of a tensor-parallel group reads the same samples for itself.
The feed needs no adapter: iterate it as it is. CORPUS is a .bin/.idx pair (`headrace prepare` makes one).
"""

import argparse

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from headrace import PackedTokens
from headrace.store import vocab_size_of
from headrace.torch import Feed


class Model(torch.nn.Module):
    """Guesses a token from the one before it: as small as a model with two parallel layers gets."""

    def __init__(self, vocab_size: int, hidden: int = 32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, hidden)
        self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.embedding(tokens)).relu())


def parallelized(model: Model, mesh) -> Model:
    return parallelize_module(model, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def main(corpus: str, steps: int = 20) -> list[float]:
    strategy = ModelParallelStrategy(parallelized, data_parallel_size=1, tensor_parallel_size=2)
    fabric = Fabric(accelerator="auto" if torch.cuda.is_available() else "cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    vocab_size = vocab_size_of(corpus)  # of its tokenizer: `headrace prepare` writes it beside the pair
    model = fabric.setup_module(Model(vocab_size))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))

    source = PackedTokens(corpus, seq_length=64, micro_batch_size=2, num_epochs=1000, vocab_size=vocab_size)
    losses = []
    # The mesh says it all: the ranks along tensor_parallel share a batch, those along data_parallel do not.
    mesh = strategy.device_mesh
    with Feed(source, group=mesh["tensor_parallel"], data_rank=mesh["data_parallel"].get_local_rank(),
              data_size=mesh["data_parallel"].size(), device=fabric.device) as feed:  # fmt: skip
        for _, batch in zip(range(steps), feed, strict=False):
            logits = model(batch["tokens"])
            each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
            loss = (each * batch["loss_mask"].flatten()).sum() / batch["loss_mask"].sum()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    fabric.print(f"{len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=20)
    main(**vars(parser.parse_args()))
