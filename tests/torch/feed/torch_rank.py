"""A rank with torch: the same calls as tests/feed/rank.py, and what only tensors and process groups can be asked."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from headrace import PackedTokens
from headrace.feed import SourceContext
from headrace.torch import Feed
from tests.feed import sources
from tests.feed.rank import Rank


class TorchRank(Rank):
    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.meshes: dict[str, Any] = {}

    def _group(self, how: dict[str, Any]) -> tuple[dict[str, Any], int, dict[str, int]]:
        """`kind`: how the group is named. The ranks of a group are neighbours."""
        for key in ("address", "ranks", "rank"):
            how.pop(key)
        kind = how.pop("kind", "process_group")
        index, data = self.rank, {"data_rank": 0, "data_size": 1}
        if kind == "process_group":
            return {"group": dist.group.WORLD}, index, data
        if kind == "single":
            data = {"data_rank": self.rank, "data_size": self.num_ranks}
            return {"group": None, **data}, 0, data
        pair = self.rank // 2
        index, data = self.rank % 2, {"data_rank": pair, "data_size": self.num_ranks // 2}
        if kind == "ranks":
            return {"group": [2 * pair, 2 * pair + 1], **data}, index, data
        return {"group": self.mesh(2, 2)}, index, data

    def _feed(self, group: dict[str, Any], how: dict[str, Any]) -> Feed:
        return Feed(**group, **how)

    def mesh(self, *shape: int, names: tuple[str, ...] = ("dp", "tp")) -> Any:
        key = f"{shape}{names}"
        if key not in self.meshes:
            self.meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        return self.meshes[key]

    # -- what only torch can be asked ----------------------------------------------------------------------------------

    def members(self, names: list[str], shape: list[int]) -> dict[str, Any]:
        """Who shares a feed in a mesh, and which shard is theirs."""
        from headrace.torch.group import members_of

        members = members_of(self.mesh(*shape, names=tuple(names)))
        return {key: getattr(members, key) for key in members.__slots__}

    def save_and_load(self, folder: str) -> dict[str, Any]:
        """The feed's state through torch.distributed.checkpoint, together with a tensor; what comes back."""
        import torch.distributed.checkpoint as dcp

        saved = self.feeds["feed"].state_dict()
        dcp.save({"model": torch.ones(2), "feed": saved}, checkpoint_id=folder)
        with Feed(partial(sources.resumable), group=dist.group.WORLD) as fresh:
            state = {"model": torch.zeros(2), "feed": fresh.state_dict()}
            dcp.load(state, checkpoint_id=folder)
            fresh.load_state_dict(state["feed"])
            batch = next(fresh)
            return {
                "same": state["feed"] == saved,
                "types": sorted({type(value).__name__ for value in state["feed"].values()}),
                "next": batch["numbers"].tolist(),
            }

    def random_state(self) -> list[str]:
        random_states: tuple[Any, ...] = (random.getstate(), np.random.get_state(), torch.get_rng_state().tolist())
        return [repr(state) for state in random_states]

    def tensors(self, name: str = "feed") -> dict[str, Any]:
        """What a batch is made of."""
        batch = next(self.feeds[name])
        again = {key: batch[key] for key in batch}
        return {
            "types": sorted({type(value).__name__ for value in again.values()}),
            "dtypes": {key: str(value.dtype) for key, value in again.items() if isinstance(value, torch.Tensor)},
            "same_object": all(batch[key] is again[key] for key in batch),
            "device": str(self.feeds[name].device),
        }

    def workers_beside(self, num_workers: int = 2) -> dict[str, Any]:
        """A DataLoader whose workers are forked while a feed is open, and read beside it."""
        loader = torch.utils.data.DataLoader(list(range(8)), num_workers=num_workers, multiprocessing_context="fork")
        feed, seen, indices = self.feeds["feed"], [], []
        for item in loader:
            seen += item.tolist()
            indices.append(next(feed).index)
        return {"seen": seen, "indices": indices}

    def make_with(self, what: str) -> None:
        """Feeds that cannot be: made on every rank, wrong on the last one where `what` says so."""
        is_last = self.rank == self.num_ranks - 1
        world, source = dist.group.WORLD, sources.numbers
        match what:
            case "an unknown setting":
                Feed(source, group=world, **({"slots": 3} if is_last else {}))
            case "too few slots":
                Feed(source, group=world, num_slots=1 if is_last else 4)
            case "hold":
                Feed(source, group=world, num_slots=2, hold=2 if is_last else 1)
            case "hold as text":
                Feed(source, group=world, hold="1" if is_last else 1)  # type: ignore[arg-type]
            case "no number":
                Feed(source, group=world, timeout_s=float("nan") if is_last else 9.0)
            case "data_rank as text":
                Feed(source, group=world, data_rank="0" if is_last else 0)  # type: ignore[arg-type]
            case "a view that is none":
                Feed(source, group=world, view=3 if is_last else None)  # type: ignore[arg-type]
            case "a config that is none":
                Feed(source, group=world, config=3 if is_last else None)  # type: ignore[arg-type]
            case "no device":
                Feed(source, group=world, device="abacus" if is_last else "cpu")
            case "another mesh":
                Feed(source, group=self.mesh(2, 2), data_rank=1 - self.rank // 2)
            case "data_rank beyond":
                Feed(source, group=world, data_rank=5, data_size=2)
            case "another data_rank":
                Feed(source, group=world, data_rank=int(is_last), data_size=2)
            case "another source":
                Feed(sources.resumable if is_last else source, group=world)
            case "another writer_rank":
                Feed(iterator=iter(()) if self.rank == 0 else None, writer_rank=int(is_last), group=world)
            case "no source":
                Feed(group=world)
            case "source and iterator":
                Feed(source, iterator=iter(()), group=world)
            case "no callable":
                Feed("corpus", group=world)  # type: ignore[arg-type]
            case "a source that contradicts itself":
                endless = PackedTokens([(0.7, "a"), (0.3, "b")], seq_length=8)
                Feed(endless if is_last else source, group=world)
            case "unpicklable":
                Feed(partial(sources.numbers, lock=os.open) if not is_last else _Unpicklable(), group=world)
            case "no iterator on the writer":
                Feed(iterator=None, writer_rank=1, group=world)
            case "iterators on others":
                Feed(iterator=iter(()), writer_rank=1, group=world)
            case "no iterable":
                Feed(iterator=5 if self.rank == 0 else None, writer_rank=0, group=world)  # type: ignore[arg-type]
            case "writer_rank beyond":
                Feed(iterator=iter(()), writer_rank=4, group=world)
            case "ranks beyond":
                Feed(source, group=[0, 1, 2, 3, 4])
            case "a rank twice":
                Feed(source, group=[0, 1, 2, 3, 3])
            case "a name":
                Feed(source, group="tp")  # type: ignore[arg-type]
            case "other ranks":
                Feed(source, group=[(self.rank + 1) % self.num_ranks])
            case "an unclear mesh":
                Feed(source, group=self.mesh(2, 2, names=("fsdp", "tp")))
            case _:
                raise AssertionError(what)

    def wait_for_missing(self) -> None:
        """All but the last rank make a feed."""
        if self.rank < self.num_ranks - 1:
            Feed(sources.numbers, group=dist.group.WORLD, start_timeout_s=0.5)
        else:
            Feed(sources.numbers, group=[self.rank]).close()

    def odd_items(self, what: str) -> list[Any]:
        """What a single process gets from items that are tensors of some kind."""
        with Feed(iterator=odd_tensors(what), writer_rank=0) as feed:
            return next(feed)["x"].tolist()


class _Unpicklable:
    def __call__(self, context: SourceContext) -> Iterator[Any]:
        return iter(())

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def odd_tensors(what: str) -> Iterator[Any]:
    kinds = {
        "a tensor": lambda: torch.arange(3),
        "not contiguous": lambda: torch.arange(6).reshape(2, 3).T,
        "gradients": lambda: torch.ones(2, requires_grad=True),
        "on a device": lambda: torch.ones(2, device="meta"),
        "bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
        "sparse": lambda: torch.eye(2).to_sparse(),
        "dates": lambda: np.array(["2024-01-01"], "datetime64[D]"),
        "words": lambda: np.array(["a"]),
    }
    yield {"x": kinds[what]()}


def shuffled(context: SourceContext) -> Any:
    """A DataLoader with workers and a random collate, in the feeder."""
    return torch.utils.data.DataLoader(
        list(range(context.data_rank, 40, context.data_size)),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        collate_fn=_with_noise,
    )


def _with_noise(rows: list[int]) -> dict[str, torch.Tensor]:
    return {"rows": torch.tensor(rows), "noise": torch.rand(2)}
