"""Megatron's own dataset behind the broadcast: the contender `megatron` of `headrace bench get-batch`.

The same loop as `broadcast` (headrace.torch.contenders), but what the DataLoader's workers call is megatron-core's
GPTDataset, sample by sample, and where documents end is found from its restarted position ids, as a loop on it must.
Its ends are those of end-of-document tokens, so the corpus needs one at the end of each document; the comparison of the
first batches says if it has not, and a corpus that shows it at once is not begun with.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from headrace.feed.packed_tokens import PackedTokens
from headrace.store import TokenStore
from headrace.torch.contenders import BroadcastFeed


def missing_reason() -> str | None:
    """Why Megatron's dataset cannot be used here; None if it can. Imports nothing: that takes seconds."""
    from importlib.util import find_spec

    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        return "megatron-core is not installed; pip install 'headrace[bench]'"
    return None


NUM_LOOKED_AT = 256
"""Documents that are read before a corpus is taken for one with end-of-document tokens."""


def unfit_reason(prefix: str) -> str | None:
    """Why Megatron's dataset would see other documents in this corpus; None if its first ones end as they must."""
    with TokenStore(prefix) as store:
        eod = int(store.read(0)[-1])
        for number in range(min(NUM_LOOKED_AT, store.num_sequences)):
            tokens = store.read(number)
            if tokens[-1] != eod or np.count_nonzero(tokens == eod) > 1:
                return (
                    f"it finds documents by an end-of-document token, and document {number} does not have {eod} at its "
                    "end alone; headrace prepare --append-eod writes it"
                )
    return None


class MegatronMicroBatches(Dataset[dict[str, torch.Tensor]]):
    """Micro batch i as item i, of GPTDataset's samples i * micro_batch_size and following."""

    def __init__(self, source: PackedTokens) -> None:
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split

        [prefix] = source.blend.prefixes
        with TokenStore(prefix) as store:
            num_documents, eod = store.num_sequences, int(store.read(0)[-1])
        tokenizer = SimpleNamespace(eod=eod, pad=-1, vocab_size=None, unique_identifiers={})
        config = GPTDatasetConfig(
            random_seed=source.seed,
            sequence_length=source.seq_length,
            split="1,0,0",
            tokenizer=tokenizer,
            reset_position_ids=True,
            reset_attention_mask=True,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        config.mock = True  # keeps no index files
        documents = np.arange(num_documents, dtype=np.int32)
        self._dataset = GPTDataset(IndexedDataset(prefix), None, documents, source.num_samples, Split.train, config)
        self._micro_batch_size = source.micro_batch_size

    def __len__(self) -> int:
        return len(self._dataset) // self._micro_batch_size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first = index * self._micro_batch_size
        samples = [self._dataset[number] for number in range(first, first + self._micro_batch_size)]
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        starts = torch.nonzero(batch["position_ids"].ravel() == 0).ravel()
        batch["cu_seqlens"] = torch.cat([starts, torch.tensor([batch["tokens"].numel()])]).to(torch.int32)
        return batch | {"max_seqlen": torch.diff(batch["cu_seqlens"]).max()}


class MegatronFeed(BroadcastFeed):
    """See BroadcastFeed; only the reading rank builds the dataset."""

    def __init__(self, source: PackedTokens, *, group: dist.ProcessGroup, num_workers: int) -> None:
        super().__init__(source, group=group, num_workers=0)
        if self._is_source:
            loader: Any = DataLoader(
                MegatronMicroBatches(source), batch_size=None, num_workers=num_workers, prefetch_factor=2
            )
            self._iterator = iter(loader)
