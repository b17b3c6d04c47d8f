"""One rank that treats the adapter as torchtitan's Trainer does: build, load, take a step's batches, save, go on.

titan_rank.py CORPUS CHECKPOINT OUTPUT_FOLDER
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from headrace.adapters.torchtitan import FeedDataLoader


def built(corpus, *, dp_rank, dp_world_size, **config):
    return FeedDataLoader.Config(dataset_path=corpus, **config).build(
        dp_world_size=dp_world_size, dp_rank=dp_rank, tokenizer=None, seq_len=32, local_batch_size=2,
        snapshot_every_n_steps=None,
    )  # fmt: skip


def plain(pairs):
    return [{name: value.tolist() for name, value in {**inputs, "labels": labels}.items()} for inputs, labels in pairs]


def main(corpus, folder, output_folder):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size)
    found = {}

    loader = built(corpus, dp_rank=0, dp_world_size=1)
    random_state = torch.get_rng_state()
    batches = iter(loader)
    step = [next(batches) for _ in range(3)]  # all before the first is used
    found["shared"] = plain(step)
    found["rng_untouched"] = bool(torch.equal(random_state, torch.get_rng_state()))
    dcp.save({"dataloader": loader}, checkpoint_id=folder)
    found["rest"] = plain(batches)
    loader.close()

    again = built(corpus, dp_rank=0, dp_world_size=1)
    again.load_state_dict({})
    dcp.load({"dataloader": again}, checkpoint_id=folder)
    found["resumed"] = plain(again)
    again.close()

    sharded = built(corpus, dp_rank=rank, dp_world_size=size)
    found["sharded"] = plain(sharded)
    sharded.close()

    with open(os.path.join(output_folder, f"{rank}.json"), "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
