"""One rank of a case of `headrace bench get-batch`: `python -m headrace.bench.get_batch_rank CASE RANK`.

See get_batch.py for what is measured and why in this way.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from headrace.bench import process_cost
from headrace.bench.get_batch_case import Block, Case, CaseResult, Cost, Delivery
from headrace.bench.get_batch_contenders import Contender, Taken, maker
from headrace.bench.iceoryx2_ring import Place
from headrace.errors import FeedTimeout, HeadraceError
from headrace.feed.packed_tokens import PackedTokens

START_TIMEOUT_S = 120.0
SETTLE_S = 0.2
"""From the resumption of a contender's background to its first step: ample for it to get as far ahead as it may."""


@dataclass(kw_only=True, slots=True)
class Entrant:
    """A contender that is up, as this rank sees it."""

    contender: Contender
    background: set[int]
    """Its processes that descend from this rank. Stopped except in its own blocks."""
    added_bytes: int
    digests: list[str]
    waits_ns: dict[float, list[tuple[list[int], Cost]]] = field(default_factory=dict)


def main() -> None:
    case, rank = msgspec.json.decode(sys.argv[1], type=Case), int(sys.argv[2])
    torch.set_num_threads(1)  # as torchrun sets it: the ranks share the cores
    join_group(case, rank)
    entrants: dict[str, Entrant] = {}
    try:
        for name in case.contenders:
            entrants[name] = bring_up(name, case, rank)
        checked = compare_digests(entrants)
        for name, pace_ms in turns(case):
            entrants[name].waits_ns.setdefault(pace_ms, []).append(run_block(entrants[name], case, pace_ms))
        result = CaseResult(
            deliveries={name: delivery(entrant, case) for name, entrant in entrants.items()}, checked_batches=checked
        )
        if rank == 0:
            (Path(case.folder) / "result.json").write_bytes(msgspec.json.encode(result))
    finally:
        for entrant in entrants.values():
            process_cost.resume(entrant.background)
            entrant.contender.close()
    dist.destroy_process_group()


def join_group(case: Case, rank: int) -> None:
    """A gloo group over the loopback. The first rank's store has a free port, which a file tells the others."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    announcement = Path(case.folder) / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        draft = announcement.with_suffix(".draft")
        draft.write_text(str(store.port))
        draft.rename(announcement)
    else:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not announcement.exists():
            if time.monotonic() > deadline:
                raise FeedTimeout("the first rank to open its store", timeout_s=START_TIMEOUT_S)
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(announcement.read_text()), is_master=False)
    timeout = timedelta(seconds=START_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.num_ranks, timeout=timeout)


def bring_up(name: str, case: Case, rank: int) -> Entrant:
    """Make a contender, take its first batches, see what it added, and stop its background. Collective."""
    place = None if case.iceoryx2_place is None else Place(**case.iceoryx2_place)
    source = PackedTokens(**case.source)
    before, processes = group_bytes(), process_cost.descendants(os.getpid())
    contender = maker(name, source, place=place, num_slots=case.num_slots, rank=rank, num_ranks=case.num_ranks)()
    digests = [digest(contender.take()) for _ in range(case.bring_up_steps)]
    dist.barrier()
    time.sleep(SETTLE_S)
    background = process_cost.descendants(os.getpid()) - processes
    added_bytes = group_bytes() - before
    process_cost.pause(background)
    return Entrant(contender=contender, background=background, added_bytes=added_bytes, digests=digests)


def group_bytes() -> int:
    """Host memory of all ranks and their descendants, the same number on every rank. Collective."""
    own = process_cost.private_and_shared_bytes({os.getpid()} | process_cost.descendants(os.getpid()))
    return sum(gathered(own))


def digest(taken: Taken) -> str:
    """Of the bytes of all fields and the longest segment."""
    *tensors, max_seqlen = taken
    state = hashlib.blake2b(str(int(max_seqlen)).encode(), digest_size=16)
    for tensor in tensors:
        state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        state.update(tensor.numpy().data)
    return state.hexdigest()


def compare_digests(entrants: dict[str, Entrant]) -> int:
    """How many first batches were the same for everybody; HeadraceError if one was not. Collective."""
    of_all_ranks = gathered({name: entrant.digests for name, entrant in entrants.items()})
    everything = [(rank, name, digests) for rank, one in enumerate(of_all_ranks) for name, digests in one.items()]
    _, first_name, expected = everything[0]
    for rank, name, digests in everything:
        for index, (got, wanted) in enumerate(zip(digests, expected, strict=True)):
            if got != wanted:
                raise HeadraceError(
                    f"batch {index} of {name} on rank {rank} is not what {first_name} delivers on rank 0"
                )
    return len(expected)


def turns(case: Case) -> Iterator[tuple[str, float]]:
    """Who delivers next, at which pace: in each round every contender has one block per pace, and the order rotates."""
    for number in range(case.num_blocks):
        first = number % len(case.contenders)
        for pace_ms in case.paces_ms:
            for name in case.contenders[first:] + case.contenders[:first]:
                yield name, pace_ms


def run_block(entrant: Entrant, case: Case, pace_ms: float) -> tuple[list[int], Cost]:
    """This rank's nanoseconds in each get_batch, lead-in first, and what the measured steps cost. Collective."""
    process_cost.resume(entrant.background)
    time.sleep(SETTLE_S)
    take, pace_s, clock = entrant.contender.take, pace_ms / 1e3, time.perf_counter_ns
    waits_ns: list[int] = []
    beginning = (0.0, 0.0, 0.0, 0)
    for step in range(case.lead_in_steps + case.steps_per_block):
        if step == case.lead_in_steps:
            beginning = meters(entrant)
        if pace_s:
            time.sleep(pace_s)
        dist.barrier()
        start = clock()
        take()
        waits_ns.append(clock() - start)
    end = meters(entrant)
    dist.barrier()
    process_cost.pause(entrant.background)
    wall_s, rank_cpu_s, writer_cpu_s, num_bytes = (now - then for now, then in zip(end, beginning, strict=True))
    return waits_ns, Cost(wall_s=wall_s, rank_cpu_s=rank_cpu_s, writer_cpu_s=writer_cpu_s, bytes_read=int(num_bytes))


def meters(entrant: Entrant) -> tuple[float, float, float, int]:
    """Wall seconds, this rank's CPU seconds, its background's CPU seconds and bytes read so far."""
    background = entrant.background
    return (
        time.monotonic(),
        time.process_time(),
        sum(map(process_cost.cpu_s, background)),
        sum(map(process_cost.bytes_read, background)),
    )


def delivery(entrant: Entrant, case: Case) -> Delivery:
    """The whole group's result of one contender, the same on every rank. Collective."""
    return Delivery(
        added_bytes=entrant.added_bytes,
        num_background_processes=sum(gathered(len(entrant.background))),
        blocks={
            str(pace_ms): tuple(merge(gathered(block), case.lead_in_steps) for block in blocks)
            for pace_ms, blocks in entrant.waits_ns.items()
        },
    )


def merge(of_ranks: list[tuple[list[int], Cost]], lead_in_steps: int) -> Block:
    """The slowest rank of each step, and the cost of all ranks together."""
    waits_ns = [max(step) for step in zip(*(waits for waits, _ in of_ranks), strict=True)]
    costs = [cost for _, cost in of_ranks]
    return Block(
        waits_ns=tuple(waits_ns[lead_in_steps:]),
        lead_in_ns=tuple(waits_ns[:lead_in_steps]),
        cost=Cost(
            wall_s=max(cost.wall_s for cost in costs),
            rank_cpu_s=sum(cost.rank_cpu_s for cost in costs),
            writer_cpu_s=sum(cost.writer_cpu_s for cost in costs),
            bytes_read=sum(cost.bytes_read for cost in costs),
        ),
    )


def gathered(value: Any) -> list[Any]:
    """The value of every rank, on every rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    main()
