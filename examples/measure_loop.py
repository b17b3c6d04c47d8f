"""Measure a plain PyTorch loop: the five marked lines, nothing else changes.

python examples/measure_loop.py [--steps 60] [--records FOLDER]
"""

import argparse

import torch

from headrace.torch import measure


def main(steps: int = 60, records: str | None = None) -> measure.Run:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.Flatten(), torch.nn.Linear(64 * 32, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.randint(0, 256, (steps * 16, 33)), batch_size=16)

    run = measure.start(model, optimizer, records=records)  # 1: forward, backward and optimizer are hooked
    for batch in run.batches(loader):  # 2: waiting for the batch
        run.count(samples=len(batch), tokens=batch[:, :-1].numel())  # 3: what the step holds
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        loss.backward()
        optimizer.step()
        with run.step.post:  # 4: what you do after the update, if you want to see it
            optimizer.zero_grad()
    print(run.close())  # 5: where the time went
    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--records", default=None)
    main(**vars(parser.parse_args()))
