"""From what torch knows of a job (process groups, device meshes, ranks) to who shares a feed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from headrace.errors import ConfigError, FeedTimeout, PeerGone

# Between two looks at the store while another rank is late. Only at the start of a feed.
LOOK_AGAIN_S = 0.02

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | Sequence[int] | None

# Names of the mesh dimensions whose coordinate selects data rather than a part of the model:
# torchtitan ("batch"), accelerate and transformers ("dp_replicate", "dp_shard"), and the plain ones.
DATA_DIMENSIONS = ("dp", "data", "batch", "dp_replicate", "dp_shard")
# And of those whose ranks share data. Any other name in a mesh of several dimensions could mean either (torchtitan's
# "fsdp" is dp_shard x cp), and a wrong guess would train on wrong data without a word.
MODEL_DIMENSIONS = ("tp", "cp", "pp", "sp", "ep", "etp", "model", "tensor", "context", "pipeline", "sequence", "expert")


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
    elif isinstance(group, Sequence) and not isinstance(group, str) and all(isinstance(rank, int) for rank in group):
        ranks = tuple(group)
        _check_ranks(ranks)
    else:
        raise ConfigError(f"a group is a ProcessGroup, a DeviceMesh, ranks or None, got {group!r}")
    rank = _own_rank()
    if rank not in ranks:
        raise ConfigError(f"rank {rank} is not a member of the group {ranks}")
    return Members(ranks=ranks, rank=rank)


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _check_ranks(ranks: tuple[int, ...]) -> None:
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < num_ranks for rank in ranks):
        hint = "" if dist.is_initialized() else " (torch.distributed is not initialised)"
        raise ConfigError(f"a group has ranks of this job, 0 to {num_ranks - 1}, each once; got {ranks}{hint}")


def _members_of_mesh(mesh: DeviceMesh) -> Members:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"rank {_own_rank()} has no place in the device mesh {mesh}")
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    unclear = [name for name in names if name not in DATA_DIMENSIONS + MODEL_DIMENSIONS]
    if unclear and mesh.ndim > 1:
        raise ConfigError(
            f"the mesh has dimensions {names}: does {unclear[0]!r} select data or share it? Known are "
            f"{DATA_DIMENSIONS} and {MODEL_DIMENSIONS}; pass the part whose ranks share data, such as mesh['tp'], or "
            "its process group, with data_rank and data_size"
        )
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

    _num_met: dict[tuple[int, ...], int] = {}  # noqa: RUF012  per process: numbers the exchanges of one group

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        """Every member makes its feeds in the same order: the n-th of each belong together."""
        self._number = self._num_met.get(ranks, 0)
        group = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        self._prefix = f"headrace/{group}/{self._number}"
        self._ranks, self._rank = ranks, rank

    def exchange(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """See Rendezvous. Between two looks at the store this process can be interrupted."""
        store: Any = dist.distributed_c10d._get_default_store()
        deadline = time.monotonic() + timeout_s
        try:
            store.set(f"{self._prefix}/{self._rank}", payload)
            payloads = [self._await(store, rank, deadline, timeout_s) for rank in self._ranks]
        except FeedTimeout:
            # Whoever gave up on a rank that had not come yet may try again and meet it; what it said counts no more.
            store.delete_key(f"{self._prefix}/{self._rank}")
            raise
        except dist.DistNetworkError as error:
            raise PeerGone("the process that holds torch.distributed's store", rank=None, pid=0, version=0) from error
        self._num_met[self._ranks] = self._number + 1
        return payloads

    def post(self, key: str, value: bytes) -> None:
        """See Rendezvous."""
        store: Any = dist.distributed_c10d._get_default_store()
        store.set(f"{self._prefix}/{key}", value)

    def look(self, key: str) -> bytes | None:
        """See Rendezvous. One round trip to the store's process."""
        store: Any = dist.distributed_c10d._get_default_store()
        return bytes(store.get(f"{self._prefix}/{key}")) if store.check([f"{self._prefix}/{key}"]) else None

    def _await(self, store: Any, rank: int, deadline: float, timeout_s: float) -> bytes:
        key = f"{self._prefix}/{rank}"
        # Not store.wait with a short timeout: torch prints a warning for each that passes.
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise FeedTimeout(
                    f"rank {rank} to make its feed (the ranks of {self._ranks} make their feeds in one order)",
                    timeout_s=timeout_s,
                    knob="start_timeout_s",
                    all_alive=False,
                )
            time.sleep(LOOK_AGAIN_S)
        return bytes(store.get(key))
