"""Targets of their own: Megatron-LM's SFTDataset where examples begin with a prompt, never a wrong one elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.packing import PackRules, example_of_turns, pack

IGNORED = -100
ROWS_OF_S = PackRules(pad=0, add_extra_token=False)


def test_two_chats_of_a_row():
    """Megatron-LM d98e8a64, sft_dataset.py, by hand: two conversations in 8 tokens."""
    tokens = np.array([[11, 12, 13, 21, 22, 0, 0, 0]], np.int32)
    targets = np.array([[-100, 12, 13, -100, 22, 0, 0, 0]], np.int32)
    batch = pack(tokens, ROWS_OF_S, document_lengths=[[3, 2]], targets=targets)
    assert batch["tokens"].tolist() == tokens.tolist()
    assert batch["labels"].tolist() == [[12, 13, -100, 22, 0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 1, 0, 0, 0, 0]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 8]
    assert batch["max_seqlen"] == 5


def test_the_same_padded_for_two_context_parallel_ranks():
    tokens = np.array([[11, 12, 13, 0, 21, 22, 0, 0]], np.int32)
    targets = np.array([[-100, 12, 13, 0, -100, 22, 0, 0]], np.int32)
    batch = pack(tokens, ROWS_OF_S, document_lengths=[[4, 4]], targets=targets)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 0, 1, 0, 0, 0]]
    assert batch["cu_seqlens"].tolist() == [0, 4, 8]


def test_an_example_that_begins_without_a_prompt_is_no_target_of_the_one_before():
    tokens = np.array([[1, 2, 3, 4, 5]], np.int32)
    batch = pack(tokens, PackRules(), document_lengths=[[2, 3]], targets=tokens)
    assert batch["labels"].tolist() == [[2, 3, 4, 5]]
    assert batch["loss_mask"].tolist() == [[1, 0, 1, 1]]


def learnt_slowly(examples, seq_length):
    """(position, target) of every token to learn: each one that is no first of its example."""
    found, start = [], 0
    for tokens, targets in examples:
        found += [(start + i - 1, int(targets[i])) for i in range(1, len(tokens)) if targets[i] != IGNORED]
        start += len(tokens)
    return [(position, target) for position, target in found if position < seq_length]


CHATS = st.lists(
    st.lists(st.tuples(st.lists(st.integers(1, 99), max_size=4), st.booleans()), min_size=1).filter(
        lambda chat: any(tokens for tokens, _ in chat)
    ),
    min_size=1,
    max_size=4,
)


@given(CHATS, st.integers(0, 3), st.sampled_from(["megatron", "transformers", "torchtitan"]), st.booleans())
def test_every_layout_learns_the_same(chats, room, layout, extra):
    examples = [example_of_turns(chat) for chat in chats]
    text = np.concatenate([tokens for tokens, _ in examples])
    seq_length = max(text.size + room - extra, 1)
    rows = np.zeros((1, seq_length + extra), np.int32)
    targets = np.zeros((1, seq_length + extra), np.int32)
    rows[0, : text.size] = text
    targets[0, : text.size] = np.concatenate([one for _, one in examples])
    lengths = [[len(tokens) for tokens, _ in examples]]
    rules = PackRules(pad=0, add_extra_token=extra)
    batch = pack(rows, rules, document_lengths=lengths, targets=targets, layout=layout)
    expected = learnt_slowly(examples, seq_length)
    if layout == "megatron":
        kept = [(i, int(batch["labels"][0, i])) for i in np.flatnonzero(batch["loss_mask"][0])]
    elif layout == "torchtitan":
        kept = [(i, int(label)) for i, label in enumerate(batch["labels"][0]) if label != IGNORED]
    else:
        kept = [(i, int(label)) for i, label in enumerate(batch["shift_labels"][0]) if label != IGNORED]
        assert np.array_equal(batch["labels"][0, 1:], batch["shift_labels"][0, :-1])
        assert batch["labels"][0, 0] == IGNORED
    assert kept == expected


def test_a_padding_row_has_no_target():
    tokens = np.array([[1, 2, 3], [1, 2, 3]], np.int32)
    batch = pack(tokens, PackRules(), document_lengths=[[3], [3]], targets=tokens, padding_rows=[1])
    assert batch["loss_mask"].tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    ("targets", "lengths", "message"),
    [
        (np.zeros((1, 4), np.int32), [[5]], r"shaped like the rows \[1, 5\] .* got int32 \[1, 4\] with them"),
        (np.zeros((1, 5), np.int32), None, r"come with document_lengths, got int32 \[1, 5\] without them"),
        (np.zeros((1, 5), np.float32), [[5]], "targets must be integers .* got float32"),
    ],
)
def test_targets_that_are_none(targets, lengths, message):
    with pytest.raises(ConfigError, match=message):
        pack(np.ones((1, 5), np.int32), PackRules(), document_lengths=lengths, targets=targets)


def test_chats_without_a_token():
    with pytest.raises(ConfigError, match="at least one token, got 1 turns without any"):
        example_of_turns([([], True)])
    tokens, targets = example_of_turns([([7, 8], False), ([9], True), ([], False)])
    assert tokens.tolist() == [7, 8, 9]
    assert targets.tolist() == [-100, -100, 9]
