"""The feed with tensors and process groups."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from headrace.errors import ConfigError
from headrace.feed import Alone, FeedConfig, Source
from headrace.feed import Feed as ArrayFeed
from headrace.feed.agreement import telling_others
from headrace.packing import View
from headrace.torch.group import Group, StoreRendezvous, members_of

DEFAULTS = FeedConfig()


class Feed(ArrayFeed[torch.Tensor]):
    """Batches of tensors for the ranks that share a data-parallel index.

        with Feed(source, group=tp_group, data_rank=dp_rank, data_size=dp_size) as feed:
            for batch in feed:
                loss = model(**batch).loss

    `group`: a ProcessGroup, a DeviceMesh (its dimensions named dp, dp_replicate, dp_shard, batch or data select the
    shard, the others share it), explicit job-wide ranks, or None for this process alone. It may be the tensor-parallel
    group alone or everything that shares data (tp x cp x pp). Every rank of it makes the feed, with the same arguments.

    `source` is PackedTokens or a callable (see headrace.feed.source) that a feeder process reads; `iterator` is given
    by the rank `writer_rank` (counted within the group) that already has one, and is None on the others.

    `device="cpu"`: tensors are views into the ring, valid while the batch is one of the last `hold` batches, or copies
    with `owned=True`. Another device: copies there, complete when the batch is handed out. Boundaries and counts are
    host ints either way. `view` is the part of each batch that this rank takes (headrace.packing.View), its own on
    every rank. Other settings are FeedConfig's. The ranks' global random state is never touched.
    """

    def __init__(
        self,
        source: Source | None = None,
        *,
        iterator: Iterable[Mapping[str, Any]] | None = None,
        writer_rank: int | None = None,
        group: Group = None,
        data_rank: int | None = None,
        data_size: int | None = None,
        seed: int = 1234,
        device: torch.device | str = "cpu",
        view: View | None = None,
        config: FeedConfig | None = None,
        **settings: Any,
    ) -> None:
        members = members_of(group)
        rendezvous = StoreRendezvous(members.ranks, members.rank) if len(members.ranks) > 1 else Alone()
        with telling_others(members.rank, rendezvous, timeout_s=DEFAULTS.start_timeout_s):
            config = _chosen_config(config, settings)
            data_rank = _chosen("data_rank", data_rank, members.data_rank, 0)
            data_size = _chosen("data_size", data_size, members.data_size, 1)
            try:
                self.device = torch.device(device)
            except RuntimeError as error:
                raise ConfigError(f"{device!r} is no device: {error}") from error
        copies = config.owned or self.device.type != "cpu"
        super().__init__(
            source,
            iterator=iterator,
            writer_rank=writer_rank,
            rendezvous=rendezvous,
            ranks=members.ranks,
            rank=members.rank,
            data_rank=data_rank,
            data_size=data_size,
            seed=seed,
            config=config,
            view=view,
            wrap=as_tensor,
            hand_out=partial(_copied, device=self.device) if copies else None,
        )


def _copied(tensors: dict[str, torch.Tensor], *, device: torch.device) -> dict[str, torch.Tensor]:
    # From pageable memory the copy is over when the call returns, so the slot may be written again afterwards.
    return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor of the same memory, which it keeps alive. ConfigError for a dtype that torch does not have."""
    try:
        with warnings.catch_warnings():
            # Under HEADRACE_DEBUG=1 the memory is read-only on purpose: a write is to fault.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except TypeError as error:
        raise ConfigError(f"a field of dtype {array.dtype} cannot be a tensor: {error}") from None


def _chosen_config(config: FeedConfig | None, settings: dict[str, Any]) -> FeedConfig:
    if config is not None and settings:
        raise ConfigError(f"give either config or single settings, not both: {sorted(settings)}")
    known = [field.name for field in dataclasses.fields(FeedConfig)]
    if unknown := sorted(settings.keys() - set(known)):
        raise ConfigError(f"a feed has no setting {', '.join(unknown)}; it has {', '.join(known)}")
    return config or FeedConfig(**settings)


def _chosen(name: str, given: int | None, from_mesh: int | None, default: int) -> int:
    if given is not None and from_mesh is not None and given != from_mesh:
        raise ConfigError(f"{name}={given} contradicts the device mesh, which says {from_mesh}")
    if given is not None:
        return given
    return default if from_mesh is None else from_mesh
