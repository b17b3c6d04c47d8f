"""torchtitan: a dataloader for its config, which every rank builds and one feeder per replica and host serves.

    def my_model() -> Trainer.Config:                       # a function of torchtitan's config registry
        config = llama3_debugmodel()
        config.dataloader = FeedDataLoader.Config(dataset_path="corpus")
        return config

torchtitan builds a loader on every rank, and ranks that differ only in their tensor, context or pipeline coordinate
read and tokenise the same text again; nothing checks that they agree. Here they share one feed. Checked against
torchtitan 0.3.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.dataloader import BaseDataLoader

from headrace.errors import ConfigError
from headrace.feed.packed_tokens import PackedTokens
from headrace.torch import Feed


class FeedDataLoader(BaseDataLoader):
    """Batches of a token store, the same on all ranks with one `dp_rank`.

    Made by `Config.build` on every rank at the same time: who shares a feed is found by one collective of the default
    process group. Its state is small, the same on every rank of the job, and may be loaded with another number of data
    ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """`dataset_path` is the path of a Megatron .bin/.idx pair, without the ending."""

        seed: int = 1234
        num_epochs: int = 1
        num_samples: int | None = None
        """Samples of the whole job; the corpus is repeated as Megatron does. None: `num_epochs` times the corpus."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        """The rest of what torchtitan passes, a tokenizer and how often it saves, is not needed here."""
        if not config.dataset_path:
            raise ConfigError("dataset_path must name a .bin/.idx pair (headrace prepare makes one), it is not set")
        source = PackedTokens(
            config.dataset_path,
            seq_length=seq_len,
            micro_batch_size=local_batch_size,
            seed=config.seed,
            num_epochs=config.num_epochs,
            num_samples=config.num_samples,
            layout="torchtitan",
        )
        # Owned: a step takes all its micro batches before it uses the first.
        self._feed = Feed(source, group=_ranks_with(dp_rank), data_rank=dp_rank, data_size=dp_world_size, owned=True)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """(input and positions, labels), int64 [local_batch_size, seq_len] each, on the CPU and for keeps.

        Positions begin anew with each document, from which torchtitan makes its masks; a target that does not count is
        -100. Nothing else is in the dict: torchtitan hands every further key to the model.
        """
        for batch in self._feed:
            yield {"input": batch["input"], "positions": batch["positions"]}, batch["labels"]

    def state_dict(self) -> dict[str, Any]:
        """Where the feed is, see headrace.torch.Feed."""
        return self._feed.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Before the first batch. An empty state, which torchtitan passes where none was saved, changes nothing."""
        if state_dict:
            self._feed.load_state_dict(state_dict)

    def close(self) -> None:
        """Leave the feed. torchtitan never asks for it; a process that ends has left as well."""
        self._feed.close()


def _ranks_with(dp_rank: int) -> list[int] | None:
    """Ranks of the job that have the same `dp_rank`. A collective; None where there is no job."""
    if not dist.is_initialized():
        return None
    everyones: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(everyones, dp_rank)
    return [rank for rank, own in enumerate(everyones) if own == dp_rank]
