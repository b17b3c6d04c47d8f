"""From what torch knows of a job (process groups, device meshes, ranks) to who shares a feed."""

from __future__ import annotations

import datetime
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from headrace.errors import ConfigError, FeedTimeout

TICK_S = 0.1

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | Sequence[int] | None

# Names of the mesh dimensions whose coordinate selects data rather than a part of the model:
# torchtitan ("batch"), accelerate and transformers ("dp_replicate", "dp_shard"), and the plain ones.
DATA_DIMENSIONS = ("dp", "data", "batch", "dp_replicate", "dp_shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """Who shares a feed, and which shard of the data is theirs if the group says so."""

    ranks: tuple[int, ...]
    rank: int
    data_rank: int | None = None
    data_size: int | None = None


def members_of(group: Group) -> Members:
    """The members of `group` as job-wide ranks.

    A ProcessGroup; a DeviceMesh, whose dimensions named like DATA_DIMENSIONS select data and whose others share it;
    explicit job-wide ranks; or None for this process alone. ConfigError if this process is not among them.
    """
    if group is None:
        return Members(ranks=(_own_rank(),), rank=_own_rank())
    if isinstance(group, DeviceMesh):
        return _members_of_mesh(group)
    if isinstance(group, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(group))
    elif isinstance(group, Sequence):
        ranks = tuple(int(rank) for rank in group)
    else:
        raise ConfigError(f"a group is a ProcessGroup, a DeviceMesh, ranks or None, got a {type(group).__name__}")
    rank = _own_rank()
    if rank not in ranks:
        raise ConfigError(f"rank {rank} is not a member of the group {ranks}")
    return Members(ranks=ranks, rank=rank)


def _own_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _members_of_mesh(mesh: DeviceMesh) -> Members:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"rank {_own_rank()} has no place in the device mesh {mesh}")
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    data_rank, data_size, where = 0, 1, []
    for name, position, size in zip(names, coordinate, mesh.shape, strict=True):
        if name in DATA_DIMENSIONS:
            data_rank, data_size = data_rank * size + position, data_size * size
            where.append(position)
        else:
            where.append(slice(None))
    ranks = tuple(mesh.mesh[tuple(where)].flatten().tolist())
    has_data = any(name in DATA_DIMENSIONS for name in names)
    return Members(
        ranks=ranks,
        rank=_own_rank(),
        data_rank=data_rank if has_data else None,
        data_size=data_size if has_data else None,
    )


class StoreRendezvous:
    """Over the key-value store that torch.distributed was started with: no collective, no device, any backend."""

    _num_made: dict[tuple[int, ...], int] = {}  # noqa: RUF012  per process: numbers the feeds of one group

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        """Every member makes its feeds in the same order: the n-th of each belong together."""
        number = self._num_made[ranks] = self._num_made.get(ranks, -1) + 1
        group = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        self._prefix = f"headrace/{group}/{number}"
        self._ranks, self._rank = ranks, rank

    def exchange(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """See Rendezvous. Looks at the store every 100 ms, so that Ctrl-C works."""
        store: Any = dist.distributed_c10d._get_default_store()
        store.set(f"{self._prefix}/{self._rank}", payload)
        deadline = time.monotonic() + timeout_s
        return [self._await(store, rank, deadline, timeout_s) for rank in self._ranks]

    def _await(self, store: Any, rank: int, deadline: float, timeout_s: float) -> bytes:
        key = f"{self._prefix}/{rank}"
        while True:
            try:
                store.wait([key], datetime.timedelta(seconds=TICK_S))
                return bytes(store.get(key))
            except dist.DistStoreError:
                if time.monotonic() > deadline:
                    raise FeedTimeout(
                        f"rank {rank} to make its feed (the ranks of {self._ranks} make their feeds in one order)",
                        timeout_s=timeout_s,
                    ) from None
