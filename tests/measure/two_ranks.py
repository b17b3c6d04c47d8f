"""What one of two gloo ranks does for test_two_ranks.py; writes what it saw as JSON.

python two_ranks.py RANK WORLD RENDEZVOUS_FILE RECORDS OUT
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from headrace.measure.batch_size import ProbeFailed, find_batch_size
from headrace.torch import measure

SLOW_RANK, SLOWER_S = 1, 0.03


def train(run, model, optimizer, steps, *, in_forward=lambda: None):
    for _ in run.batches(range(steps)):
        run.count(samples=4, tokens=64)
        loss = model(torch.ones(4, 8)).sum()
        in_forward()
        loss.backward()
        if not isinstance(model, DistributedDataParallel):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    run.close()


def slow_rank(rank, records):
    """Rank 1 takes 30 ms longer in its forward; every step's gradients are reduced by wrapped collectives."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    lines, unwrapped = [], dist.all_reduce
    run = measure.start(
        model,
        optimizer,
        communication=True,
        slow_rank=True,
        records=records,
        log_every=4,
        warmup_steps=2,
        print_line=lines.append,
    )
    assert dist.all_reduce is not unwrapped

    def lag():
        if rank == SLOW_RANK:
            with run.step.forward:
                threading.Event().wait(SLOWER_S)

    train(run, model, optimizer, 32, in_forward=lag)
    return {
        "run": run.facts.run,
        "communication_s": run.summary().phases["communication"].mean_s,
        "verdict": None if run.slow_rank is None else dataclasses.asdict(run.slow_rank),
        "lines": len(lines),
        "unwrapped_again": dist.all_reduce is unwrapped,
    }


def collectives(rank):
    """Each kind of call, once per step: does it count, and does it still give what it gave?"""
    run = measure.start(communication=True, warmup_steps=0, print_line=None)
    seen = {}

    def step(name, call):
        seen[name] = call()
        run.end()

    def asynchronous():
        tensor = torch.ones(4)
        work = dist.all_reduce(tensor, async_op=True)
        finished_early = work.is_completed() in (True, False)
        work.wait()
        return [tensor.tolist(), finished_early]

    def point_to_point():
        mine, theirs = torch.full((2,), float(rank)), torch.empty(2)
        operations = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return theirs.tolist()

    def objects():
        found = [None, None]
        dist.all_gather_object(found, {"rank": rank})
        return found

    def dtensor():
        mesh = init_device_mesh("cpu", (2,))
        sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        whole = sharded.redistribute(mesh, [Replicate()])
        assert isinstance(whole, DTensor)
        return (whole.to_local() + 0).tolist()

    counted = []
    run.step.sink = lambda times, payload: counted.append(times.phases_ns["communication"])
    step("asynchronous", asynchronous)
    step("point_to_point", point_to_point)
    step("objects", objects)
    step("dtensor", dtensor)
    step("nothing", lambda: None)
    run.close()
    return {name: {"result": result, "ns": ns} for (name, result), ns in zip(seen.items(), counted, strict=True)}


def below_python():
    """DDP reduces gradients in C++: the wrapper must say that it does not see that."""
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = measure.start(model, optimizer, communication=True, warmup_steps=0, print_line=None)
    train(run, model, optimizer, 2)
    phase = run.summary().phases["communication"]
    return {"mean_s": phase.mean_s, "reason": phase.reason}


def from_another_thread():
    """A collective issued by another thread while the loop runs makes the step's communication incomplete."""
    run = measure.start(communication=True, warmup_steps=0, print_line=None)
    with run.step.forward:
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
        thread.start()
        thread.join()
    run.end()
    run.close()
    return run.summary().phases["communication"].reason


class Probe:
    """This rank's memory holds `capacity` samples; at `dies_at` the process is gone."""

    def __init__(self, capacity, dies_at=None):
        self.capacity, self.dies_at, self.ran = capacity, dies_at, []

    def run(self, batch_size):
        self.ran.append(batch_size)
        if batch_size == self.dies_at:
            os._exit(7)
        if batch_size > self.capacity:
            raise RuntimeError("NPU out of memory. Tried to allocate 1 GiB")
        return batch_size

    def restore(self):
        pass


def batch_sizes(rank):
    probe = Probe(capacity=(1000, 90)[rank])
    got = find_batch_size(probe, upper=512, agree=measure.agree_on_minimum())
    return {"largest": got.largest, "ran": probe.ran}


def a_rank_dies(rank):
    probe = Probe(capacity=1000, dies_at=64 if rank == 1 else None)
    try:
        find_batch_size(probe, upper=512, agree=measure.agree_on_minimum(timeout_s=30))
    except ProbeFailed as error:
        return str(error)
    return "nothing happened"


def main():
    rank, world, rendezvous, records, out = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    found = {
        "slow_rank": slow_rank(rank, records),
        "collectives": collectives(rank),
        "below_python": below_python(),
        "from_another_thread": from_another_thread(),
        "batch_sizes": batch_sizes(rank),
    }
    Path(out).write_text(json.dumps(found))
    found["a_rank_dies"] = a_rank_dies(rank)
    Path(out).write_text(json.dumps(found))
    os._exit(0)  # the group is broken on purpose: there is nothing left to take down in order


if __name__ == "__main__":
    main()
