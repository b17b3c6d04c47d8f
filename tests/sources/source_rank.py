"""One rank of two that takes batches from each source.

source_rank.py OUTPUT_FOLDER all            every source to its end
source_rank.py OUTPUT_FOLDER killed         three batches of those that can resume; then SIGKILL, and no goodbye
source_rank.py OUTPUT_FOLDER resumed        the rest of them
"""

import json
import os
import pickle
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from headrace.feed import SourceContext
from headrace.torch import Feed
from tests.sources import people

NUM_BEFORE = 3


def described(batch):
    """A batch, or what the source yields, in JSON."""
    items = {**dict(batch), **getattr(batch, "extra", {})}
    return {
        name: np.asarray(value).tolist() if hasattr(value, "dtype") else value for name, value in sorted(items.items())
    }


def random_states():
    return repr((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))


def make(name, rank):
    source = people.SOURCES[name]
    if name not in people.HELD_BY_RANK_0:
        return Feed(source, group=dist.group.WORLD)
    iterator = source(SourceContext(data_rank=0, data_size=1, seed=1234)) if rank == 0 else None
    return Feed(iterator=iterator, writer_rank=0, group=dist.group.WORLD)


def take_all(rank):
    found = {}
    for name in people.SOURCES:
        before = random_states()
        with make(name, rank) as feed:
            batches = [described(batch) for batch in feed]
            ended_at = feed.state_dict()["consumed_batches"]
        found[name] = {"batches": batches, "ended_at": ended_at, "random": before == random_states()}
    return found


def begin_and_die(rank, folder):
    for name in people.CAN_RESUME:
        feed = make(name, rank)
        found = [described(next(feed)) for _ in range(NUM_BEFORE)]
        (folder / f"{name}-{rank}.pickle").write_bytes(pickle.dumps((found, feed.state_dict())))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(rank, folder):
    found = {}
    for name in people.CAN_RESUME:
        before, state = pickle.loads((folder / f"{name}-{rank}.pickle").read_bytes())
        with make(name, rank) as feed:
            feed.load_state_dict(state)
            found[name] = {"before": before, "after": [described(batch) for batch in feed]}
    return found


def main(folder, what):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size)
    folder = Path(folder)
    if what == "killed":
        begin_and_die(rank, folder)
    found = take_all(rank) if what == "all" else go_on(rank, folder)
    (folder / f"{what}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
