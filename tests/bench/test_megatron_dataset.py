"""The contender `megatron` delivers what all others deliver, made by megatron-core."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is a test dependency")

import torch

from headrace.bench.corpus import write_synthetic
from headrace.bench.megatron_dataset import MegatronMicroBatches
from headrace.feed.packed_tokens import PackedTokens
from headrace.torch.contenders import PackedDataset


def test_its_micro_batches_are_the_feeds(tmp_path):
    write_synthetic(str(tmp_path / "corpus"), num_tokens=30_000, seed=1)
    source = PackedTokens(str(tmp_path / "corpus"), seq_length=128, micro_batch_size=2, num_samples=60)
    theirs, ours = MegatronMicroBatches(source), PackedDataset(source, data_rank=0, data_size=1)
    assert len(theirs) == len(ours) >= 30
    for index in range(30):
        expected = ours[index]
        assert theirs[index].keys() == expected.keys() - {"num_documents"}
        for name, field in theirs[index].items():
            assert torch.equal(field, expected[name]), (name, index)
            assert field.dtype == expected[name].dtype
