"""megatron-core's own GPTDataset on random rows gives what `pack` gives."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from headrace.packing import PackRules, pack

gpt_dataset = pytest.importorskip(
    "megatron.core.datasets.gpt_dataset", reason="megatron-core is not installed (extra: bench)"
)

EOD, PAD = 3, 5


class OneRow(gpt_dataset.GPTDataset):
    """GPTDataset with a row in place of a corpus: no index is built, everything after the reading is Megatron's."""

    def __init__(self, row, rules: PackRules) -> None:
        self.row = row
        self._pad_token_id = rules.effective_pad
        self.masks_and_position_ids_are_cacheable = False
        self.config = SimpleNamespace(
            tokenizer=SimpleNamespace(eod=rules.eod),
            reset_position_ids=rules.reset_position_ids,
            reset_attention_mask=rules.reset_attention_mask,
            eod_mask_loss=rules.eod_mask_loss,
            add_extra_token_to_sequence=rules.add_extra_token,
            create_attention_mask=True,
        )

    def _query_document_sample_shuffle_indices(self, idx):
        return self.row.astype(np.int64), np.zeros(1, np.int64)


def segments_of(attention_mask) -> list[int]:
    """Ends of the blocks of a causal mask [1, S, S] (True: hidden): a query's block starts at its first visible key."""
    visible = ~attention_mask.numpy()[0]
    starts = visible.argmax(axis=1)
    assert all(visible[query, starts[query] : query + 1].all() for query in range(len(starts)))
    return [*np.flatnonzero(np.diff(starts)).tolist(), len(starts) - 1]


@pytest.mark.parametrize("seed", range(60))
def test_random_rows(seed):
    random = np.random.default_rng(seed)
    rules = PackRules(
        eod=EOD,
        pad=[PAD, EOD, 0, None][random.integers(4)],
        **{
            flag: bool(random.integers(2))
            for flag in (
                "reset_position_ids",
                "reset_attention_mask",
                "eod_mask_loss",
                "add_extra_token",
                "allow_ambiguous_pad_tokens",
            )
        },
    )
    num_rows, seq_length = int(random.integers(1, 4)), int(random.choice([1, 2, 7, 40, 120]))
    rows = random.integers(0, 9, (num_rows, rules.row_length(seq_length)), np.int32)
    rows[random.random(rows.shape) < random.choice([0, 0.5])] = EOD
    rows[:, rows.shape[1] - int(random.integers(0, seq_length + 1)) :] = rules.effective_pad
    padding_rows = [0] if random.integers(2) else []

    batch = pack(rows, rules, padding_rows=padding_rows)
    cu_seqlens = [0]
    for number, row in enumerate(rows):
        sample = OneRow(row, rules)[None if number in padding_rows else 0]
        for key in ("tokens", "labels", "loss_mask", "position_ids"):
            assert sample[key].numpy().dtype == batch[key].dtype
            assert sample[key].tolist() == batch[key][number].tolist(), key
        cu_seqlens += [number * seq_length + end + 1 for end in segments_of(sample["attention_mask"])]
    assert batch["cu_seqlens"].tolist() == cu_seqlens
