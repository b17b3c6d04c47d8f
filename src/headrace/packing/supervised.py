"""Supervised examples: each token has a target of its own, -100 where there is nothing to learn, as in a prompt.

    a chat          user: 11   assistant: 12 13    user: 21   assistant: 22
    tokens          11         12 13               21         22             0 0 0       padding
    targets         -100       12 13               -100       22
    labels          12         13 -100             22         0              0 0 0       the next target
    loss_mask       1          1  0                1          0              0 0 0

Meaning after Megatron-LM's SFTDataset (megatron/training/datasets/sft_dataset.py), with one difference: the last token
of an example never has a target. There it would be the first of the next example, which nobody can predict; Megatron
relies on examples that begin with a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ConfigError
from headrace.packing.layouts import IGNORED_LABEL

Turn = tuple[Sequence[int], bool]
"""Tokens, and whether the model is to learn them: what the assistant says, not what it is told."""


def example_of_turns(turns: Sequence[Turn]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Tokens and targets of a chat, int32 [tokens] each. ConfigError for a chat without a token."""
    pieces = [(np.asarray(tokens, np.int32), learnt) for tokens, learnt in turns]
    if not sum(tokens.size for tokens, _ in pieces):
        raise ConfigError(f"a chat needs at least one token, got {len(pieces)} turns without any")
    targets = [tokens if learnt else np.full_like(tokens, IGNORED_LABEL) for tokens, learnt in pieces]
    return np.concatenate([tokens for tokens, _ in pieces]), np.concatenate(targets)


def write_targets(
    targets: npt.NDArray[Any],
    document_lengths: Sequence[Sequence[int]],
    outputs: Mapping[str, npt.NDArray[Any] | None],
    *,
    seq_length: int,
    pad: int,
    padding_rows: Sequence[int] = (),
) -> int:
    """Write what depends on targets; returns how many positions have one.

    `targets` [B, seq_length (+ 1)] lies beside the token rows, with `pad` as padding. `outputs` are by the names of the
    packing pass: labels, loss_mask, shift_labels, hf_labels, B * seq_length elements each, None where not wanted.
    `document_lengths`: per row, of the text, as in `Packer.pack_into`.
    """
    num_rows = targets.shape[0]
    labels = np.full((num_rows, seq_length), pad, np.int64)
    following = targets[:, 1 : seq_length + 1]
    labels[:, : following.shape[1]] = following
    is_target = (labels != pad) & (labels != IGNORED_LABEL)
    for row, lengths in enumerate(document_lengths):
        starts = np.cumsum(lengths)[:-1]  # a document's first token is nobody's target
        is_target[row, starts[(starts > 0) & (starts <= seq_length)] - 1] = False
    is_target[list(padding_rows)] = False
    learnt = np.where(is_target, labels, IGNORED_LABEL)
    labels[labels == pad] = 0
    moved = np.concatenate([np.full((num_rows, 1), IGNORED_LABEL), learnt[:, :-1]], 1)
    written = {"labels": labels, "loss_mask": is_target, "shift_labels": learnt, "hf_labels": moved}
    for name, values in written.items():
        output = outputs.get(name)
        if output is not None:
            output.reshape(values.shape)[...] = values
    return int(is_target.sum())
