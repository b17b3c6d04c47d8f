"""Batches from a feeder process, as an iterator that Megatron takes on every rank.

`--headrace-feeder` puts such iterators where Megatron builds its own; a script with `--dataloader-type external` may
return them from its dataset provider. They yield what a DataLoader over GPTDataset yields, on every rank of the
tensor-parallel group: host tensors that are the caller's, because Megatron's RerunDataIterator keeps and saves them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from headrace.adapters.megatron.places import replace_everywhere
from headrace.errors import ConfigError
from headrace.feed.packed_tokens import PackedTokens
from headrace.torch import Feed

BUILDER = "build_train_valid_test_data_iterators"


class FeedIterator:
    """One feeder's batches on one rank. The feeder starts with the first `next`, which all ranks of the group call.

    `consumed_samples` of the whole job are skipped: Megatron's consumed_train_samples.
    """

    def __init__(
        self, source: PackedTokens, *, ranks: Sequence[int], data_rank: int, data_size: int, consumed_samples: int = 0
    ) -> None:
        self._source, self._ranks = source, list(ranks)
        self._data_rank, self._data_size = data_rank, data_size
        self._consumed_samples = consumed_samples
        self._feed: Feed | None = None

    def __iter__(self) -> FeedIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        """tokens, labels, position_ids (int64 [B, S]), loss_mask (float32 [B, S]), and where documents end as ints.
        Blocks. StopIteration on all ranks at the same batch; errors as of headrace.torch.Feed."""
        if self._feed is None:
            self._feed = self._start()
        batch = next(self._feed)
        fields: dict[str, Any] = {name: batch[name] for name in ("tokens", "labels", "loss_mask", "position_ids")}
        return fields | {"actual_seq_len": batch.actual_seq_len, "max_document": batch.max_seqlen}

    def _start(self) -> Feed:
        feed = Feed(
            self._source,
            group=self._ranks if torch.distributed.is_initialized() else None,
            data_rank=self._data_rank,
            data_size=self._data_size,
            owned=True,
        )
        # Megatron's checkpoint knows no more than this number; whether the data are the same is its user's word.
        feed.load_state_dict(feed.state_dict() | {"consumed_samples": self._consumed_samples})
        return feed

    def close(self) -> None:
        """End the feeder. Idempotent."""
        if self._feed is not None:
            self._feed.close()


def build_here() -> None:
    """Put the feeder's iterators where Megatron builds its own. ConfigError if this Megatron builds them elsewhere."""
    training = sys.modules.get("megatron.training.training")
    original = getattr(training, BUILDER, None)
    if original is None:
        raise ConfigError(f"--headrace-feeder: this Megatron has no megatron.training.training.{BUILDER}")

    def build_train_valid_test_data_iterators(*_: Any, **__: Any) -> tuple[Any, Any, Any]:
        return _iterators(training)

    replace_everywhere(original, build_train_valid_test_data_iterators)


def _iterators(training: Any) -> tuple[Any, Any, Any]:
    """Train, valid and test as Megatron's own function returns them, and the flags that it sets."""
    from megatron.core import parallel_state as mpu
    from megatron.core.rerun_state_machine import RerunDataIterator

    args = training.get_args()
    if args.iteration > 0 and args.consumed_train_samples == 0:
        raise ConfigError(
            f"the checkpoint of iteration {args.iteration} does not say how many samples were consumed: continue it "
            "without --headrace-feeder"
        )
    consumed = (args.consumed_train_samples, args.consumed_valid_samples, 0)
    wanted = (not args.skip_train and bool(args.train_iters), args.eval_iters > 0, args.eval_iters > 0)
    args.do_train, args.do_valid, args.do_test = wanted
    ranks = torch.distributed.get_process_group_ranks(mpu.get_tensor_model_parallel_group())
    iterators = []
    for name, num_samples, is_wanted, skipped in zip(
        ("train", "valid", "test"), training.get_train_valid_test_num_samples(), wanted, consumed, strict=True
    ):
        iterator = FeedIterator(
            _source(args, training, name, num_samples),
            ranks=ranks,
            data_rank=mpu.get_data_parallel_rank(),
            data_size=mpu.get_data_parallel_world_size(),
            consumed_samples=skipped,
        )
        iterators.append(RerunDataIterator(iterator) if is_wanted else None)
    return iterators[0], iterators[1], iterators[2]


def _source(args: Any, training: Any, split_name: str, num_samples: int) -> PackedTokens:
    """What GPTDatasetConfig would say for the same arguments."""
    tokenizer = training.get_tokenizer() if hasattr(training, "get_tokenizer") else _tokenizer()
    return PackedTokens.from_data_path(
        args.data_path,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        seed=args.seed,
        num_samples=num_samples,
        split=args.split,
        split_name=split_name,
        boundaries="eod",
        eod=tokenizer.eod,
        pad=_pad_of(tokenizer),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
    )


def _tokenizer() -> Any:
    return sys.modules["megatron.training"].get_tokenizer()


def _pad_of(tokenizer: Any) -> int | None:
    """As GPTDataset: the tokenizer's pad, or none."""
    try:
        return int(tokenizer.pad)
    except (AttributeError, NotImplementedError, TypeError):
        return None
