"""The feed with tensors and process groups."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from headrace.errors import ConfigError, HeadraceError
from headrace.feed import Alone, Batch, FeedConfig, Source
from headrace.feed import Feed as ArrayFeed
from headrace.feed.agreement import telling_others
from headrace.packing import View
from headrace.position import Position
from headrace.torch.device import Accelerator, Copy, DeviceCopies, numa_node_of
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

    `device="cpu"`: tensors are views into the ring, valid while the batch is one of the last `hold` batches. Another
    device: views of memory there, to be used on the stream that is current when the batch is taken, valid in the same
    sense; the next batch is copied meanwhile, and the host never waits for the device (headrace.torch.device). Copies
    for keeps with `owned=True`. Boundaries and counts are host ints either way.

    `view` is the part of each batch that this rank takes (headrace.packing.View), its own on every rank. Other settings
    are FeedConfig's. The ranks' global random state is never touched.
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
            self._users_hold = config.hold
            self._device_copies: DeviceCopies | None = None
            if self.device.type != "cpu" and not config.owned:
                self._device_copies = DeviceCopies(Accelerator(self.device), num_slabs=config.hold + 1)
                config = _with_room_to_copy_ahead(config)
            device_node = numa_node_of(self.device)
        self._ahead: _Ahead | None = None
        self._handed_out: Position | None = None
        self._in_use: deque[Copy] = deque()
        self._copies_of_slots: deque[Copy] = deque()
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
            device_node=device_node,
            wrap=as_tensor,
            hand_out=self._start_copy
            if self._device_copies
            else partial(_copied, device=self.device)
            if config.owned
            else None,
        )
        if self._device_copies is not None:
            self._hands_out_owned = False
            # Runs after the ring is left, so the copies are waited for in close() as well; here for who never closes.
            self._member.resources.callback(self._device_copies.close)

    # -- another device: the next batch is copied while this one is used -----------------------------------------------

    def _next_slowly(self) -> Batch[torch.Tensor]:
        if self._device_copies is None:
            return super()._next_slowly()
        ahead = self._ahead or self._fetch()
        self._ahead = None
        if len(self._in_use) == self._users_hold:
            self._in_use.popleft().retire()
        self._in_use.append(ahead.copy)
        ahead.copy.hand_over()
        self._handed_out = ahead.position
        if self._is_ready:
            # What ends the feed is told with the next call; this batch is good.
            with contextlib.suppress(HeadraceError, StopIteration):
                self._ahead = self._fetch()
        return ahead.batch

    def _fetch(self) -> _Ahead:
        # Taking a batch hands back the slots of all but the last `hold - 1`: those whose copies are long over.
        while len(self._copies_of_slots) >= self.config.hold:
            self._copies_of_slots.popleft().wait_until_left_host()
        batch = super()._next_slowly()
        return _Ahead(batch=batch, copy=self._copies_of_slots[-1], position=super()._position())

    def _start_copy(self, tensors: dict[str, torch.Tensor], slot: np.ndarray) -> dict[str, torch.Tensor]:
        assert self._device_copies is not None
        copy = self._device_copies.start(slot, tensors)
        self._copies_of_slots.append(copy)
        return copy.tensors

    def _position(self) -> Position:
        """Of the batch that was handed out, not of the one that is copied ahead."""
        return self._handed_out or super()._position()

    def close(self) -> None:
        """See headrace.feed.Feed. Waits for the copy that is under way: its slot may be written again afterwards."""
        if self._device_copies is not None:
            self._device_copies.close()
        super().close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ahead:
    """A batch that is being copied, or is on the device, and where the feed is once it has been handed out."""

    batch: Batch[torch.Tensor]
    copy: Copy
    position: Position


def _with_room_to_copy_ahead(config: FeedConfig) -> FeedConfig:
    """A slot more is held than the user holds batches: the one that is being copied from."""
    hold = config.hold + 1
    return dataclasses.replace(config, hold=hold, num_slots=max(config.num_slots, hold + 1))


def _copied(tensors: dict[str, torch.Tensor], slot: np.ndarray, *, device: torch.device) -> dict[str, torch.Tensor]:
    # From pageable memory the copy is over when the call returns, so the slot may be written again afterwards.
    return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor of the same memory, which it keeps alive. ConfigError for a dtype that torch does not have."""
    try:
        if array.flags.writeable:
            return torch.from_numpy(array)
        with warnings.catch_warnings():
            # Under HEADRACE_DEBUG=1 the memory is read-only on purpose: a write is to fault.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except TypeError as error:
        raise ConfigError(f"a field of dtype {array.dtype} cannot be a tensor: {error}") from None


def _chosen_config(config: FeedConfig | None, settings: dict[str, Any]) -> FeedConfig:
    if config is not None and settings:
        raise ConfigError(f"give either config or single settings, not both: {sorted(settings)}")
    if config is not None and not isinstance(config, FeedConfig):
        raise ConfigError(f"config must be a FeedConfig or None, got {config!r}")
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
