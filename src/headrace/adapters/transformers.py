"""transformers: a Trainer that takes its training batches from a feed, and saves where it is with each checkpoint.

    source = PackedTokens("corpus", seq_length=4096, layout="transformers")
    feed = Feed(source, group=tp_group, data_rank=dp_rank, data_size=dp_size, owned=True)
    FeedTrainer(model=model, args=TrainingArguments(folder, max_steps=1000), feed=feed).train()

Trainer's own loader is wrapped by accelerate, which decides by itself what each rank reads. The feed's batches pass
untouched: what shares a replica was decided when the feed was made. Checked against transformers 5.24.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from headrace.errors import ConfigError
from headrace.torch import Feed

STATE_FILE = "feed.pt"


class FeedTrainer(Trainer):
    """Trainer, fed by `feed`, which is the caller's: Trainer never closes it.

    A feed decides what a rank reads, so its `data_size` must be Trainer's number of data ranks: with 1 on each of
    several, all would train on the same batches. ConfigError otherwise.

    `args.max_steps` says how long; the feed has no length. The batches of a step are all taken before the first is
    used, so the feed needs `owned=True`, or `hold` of at least args.gradient_accumulation_steps; ConfigError otherwise.
    Its state lies in each checkpoint, and `train(resume_from_checkpoint=...)` goes on from it: no batch is drawn and
    dropped. With several data ranks the source must be PackedTokens, whose state is the same on all of them;
    ConfigError for another one.
    """

    def __init__(self, *args: Any, feed: Feed, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        need, hold = self.args.gradient_accumulation_steps, feed.config.hold
        if not feed.config.owned and hold < need:
            raise ConfigError(
                f"a step takes {need} batches before it uses the first, the feed holds {hold}; make it with owned=True"
            )
        self._check_shards(feed)
        # Or Trainer would draw what was trained on already; the feed begins behind it.
        self.args.ignore_data_skip = True
        self.feed = feed
        self.add_callback(_FeedState(feed))

    def _check_shards(self, feed: Feed) -> None:
        # Trainer's own arithmetic (get_total_train_batch_size, 5.24).
        num_data_ranks = self.args.world_size // (self.get_tp_size() * self.get_cp_size() * self.get_sp_size())
        has, source = feed._member.topology.data_size, feed._member.request.source
        if has != num_data_ranks:
            raise ConfigError(
                f"Trainer has {num_data_ranks} data ranks in {self.args.world_size} processes, the feed of rank "
                f"{feed._member.rank} has data_size {has}: ranks would train on the same batches; make it with "
                f"data_size={num_data_ranks} and each rank's data_rank"
            )
        if has > 1 and not hasattr(source, "open_production"):
            raise ConfigError(
                f"with {has} data ranks a checkpoint holds the state of rank 0 alone, and after a resume all of them "
                f"would go on with its data; the source must be PackedTokens, got {feed.state_dict()['source']}"
            )

    def get_train_dataloader(self) -> Any:
        """The feed, as something that can be iterated. Overrides what accelerate would wrap."""
        return _PlainBatches(self.feed)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """See Trainer.train. Raises ConfigError where a checkpoint holds no state of a feed."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        if folder:
            state = _load(os.path.join(str(folder), STATE_FILE))
            self.feed.load_state_dict(state)
        return super().train(resume_from_checkpoint, *args, **kwargs)


class _PlainBatches:
    """Dicts: Trainer makes another mapping of the batch's own type, which only a dict can be made to."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(batch) for batch in self._feed)


class _FeedState(TrainerCallback):
    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            folder = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            torch.save(self._feed.state_dict(), os.path.join(folder, STATE_FILE))


def _load(path: str) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: the checkpoint was not saved by a FeedTrainer; start without it, or set the feed "
            "yourself with load_state_dict"
        ) from None
    return state
