"""All ranks' numbers on every rank, through a gloo group of their own: the training's streams and groups stay free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

# Bound before any wrapper is installed: measuring must not count itself as communication.
from torch.distributed import all_gather, all_reduce

MAX_IN_FLIGHT = 8
"""Windows whose rows may be on their way. When a rank stops answering, sending ends instead of piling up."""
CLOSE_TIMEOUT_S = 5.0


class GlooGather:
    """Gathers rows asynchronously: `submit` starts, gloo's threads carry, a later `ready` picks up. Never blocks.

    Making one is a collective call (every rank of the job makes it at the same point), because it makes a group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = dist.new_group(backend="gloo") if group is None else group
        self.in_flight: deque[tuple[dist.Work, list[torch.Tensor]]] = deque()

    def submit(self, row: list[float]) -> None:
        """Send this rank's row. Raises RuntimeError when MAX_IN_FLIGHT rows were never answered."""
        if len(self.in_flight) >= MAX_IN_FLIGHT:
            raise RuntimeError(f"{MAX_IN_FLIGHT} windows are unanswered: a rank has stopped or records other windows")
        mine = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        self.in_flight.append((all_gather(rows, mine, group=self.group, async_op=True), rows))

    def ready(self) -> list[list[list[float]]]:
        """Completed gathers, oldest first: [gather][rank][number]. Raises what a lost connection raises."""
        done = []
        while self.in_flight and self.in_flight[0][0].is_completed():
            work, rows = self.in_flight.popleft()
            work.wait()
            done.append([row.tolist() for row in rows])
        return done

    def close(self) -> None:
        """Wait a little for what is on its way, so that leaving the job does not tear a gather apart."""
        while self.in_flight:
            work, _ = self.in_flight.popleft()
            work.wait(timedelta(seconds=CLOSE_TIMEOUT_S))


def agree_on_minimum(group: dist.ProcessGroup | None = None, *, timeout_s: float = 1800.0) -> Callable[[int], int]:
    """A function that returns the smallest value any rank gave it. Blocks until all ranks have called it.

    Making one is a collective call unless `group` (a gloo group) is given. A rank that is gone is torch's RuntimeError.
    Alone it returns its argument.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return lambda value: value
    agreeing = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if group is None else group

    def agree(value: int) -> int:
        smallest = torch.tensor([value], dtype=torch.int64)
        all_reduce(smallest, dist.ReduceOp.MIN, group=agreeing)
        return int(smallest.item())

    return agree
