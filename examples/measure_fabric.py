"""Measure a Lightning Fabric loop: start before `fabric.setup`, so that the hooks sit on the model that really runs.

python examples/measure_fabric.py [--steps 60] [--records FOLDER]
"""

import argparse

import torch
from lightning_fabric import Fabric

from headrace.torch import measure


def main(steps: int = 60, records: str | None = None) -> measure.Run:
    fabric = Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    run = measure.start(model, optimizer, device=fabric.device, records=records)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.randn(steps * 16, 64), batch_size=16))
    for batch in run.batches(loader):
        run.count(samples=len(batch))
        loss = model(batch).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(run.close())
    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--records", default=None)
    main(**vars(parser.parse_args()))
