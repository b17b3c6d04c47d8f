"""The packing pass once more, token by token, as the rules read. Slow and plain: the C pass must agree with it.

Written from Megatron-LM's documentation of its flags (GPTDataset), not from native/pack.h: each position is looked at
by itself, and a document is a number that positions share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.packing import PackRules

IGNORED = -100


@dataclass
class Expected:
    """Dense fields as one list per row."""

    tokens: list[list[int]] = field(default_factory=list)
    labels: list[list[int]] = field(default_factory=list)
    loss_mask: list[list[int]] = field(default_factory=list)
    position_ids: list[list[int]] = field(default_factory=list)
    hf_labels: list[list[int]] = field(default_factory=list)
    shift_labels: list[list[int]] = field(default_factory=list)
    cu_seqlens: list[int] = field(default_factory=lambda: [0])
    num_valid_tokens: int = 0

    @property
    def num_documents(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def max_seqlen(self) -> int:
        return int(np.diff(self.cu_seqlens).max())

    @property
    def num_loss_tokens(self) -> int:
        return sum(map(sum, self.loss_mask))


def pack_slowly(rows, rules: PackRules, document_lengths=None, padding_rows=()) -> Expected:
    """What `rows` become. `rows` is anything that iterates as rows of ints."""
    expected = Expected()
    for number, row in enumerate(rows):
        text = [int(token) for token in row]
        lengths = None if document_lengths is None else list(document_lengths[number])
        _add_row(expected, text, rules, lengths, number in padding_rows)
    return expected


def _add_row(
    expected: Expected, text: list[int], rules: PackRules, lengths: list[int] | None, is_padding: bool
) -> None:
    pad = -1 if rules.pad is None else rules.pad
    if pad == rules.eod and not rules.allow_ambiguous_pad_tokens:
        pad = -1

    tokens = text[:-1] if rules.add_extra_token else text
    labels = text[1:] if rules.add_extra_token else [*text[1:], pad]
    mask = [
        int(not is_padding and label != pad and not (rules.eod_mask_loss and token == rules.eod))
        for token, label in zip(tokens, labels, strict=True)
    ]
    targets = [label if kept else IGNORED for label, kept in zip(labels, mask, strict=True)]

    if lengths is None:
        by_eod = [tokens[:i].count(rules.eod) if rules.eod is not None else 0 for i in range(len(tokens))]
        one_document = [0] * len(tokens)
        attention = by_eod if rules.reset_attention_mask else one_document
        positions = by_eod if rules.reset_position_ids else one_document
    else:
        attention = positions = _document_of_each_token(lengths, len(tokens), rules.add_extra_token)

    expected.tokens.append([0 if token == pad else token for token in tokens])
    expected.labels.append([0 if label == pad else label for label in labels])
    expected.loss_mask.append(mask)
    expected.position_ids.append([i - positions.index(document) for i, document in enumerate(positions)])
    expected.shift_labels.append(targets)
    expected.hf_labels.append([IGNORED, *targets[:-1]])
    for i, document in enumerate(attention):
        if i + 1 == len(attention) or attention[i + 1] != document:
            expected.cu_seqlens.append(len(expected.tokens) * len(tokens) - len(tokens) + i + 1)
    if not is_padding:
        expected.num_valid_tokens += _text_before_padding(tokens, pad, lengths)


def _document_of_each_token(lengths: list[int], seq_length: int, add_extra_token: bool) -> list[int]:
    lengths = [length for length in lengths if length]
    if add_extra_token:
        lengths[-1] -= 1
        if lengths[-1] == 0 and len(lengths) > 1:
            lengths.pop()
    lengths[-1] += seq_length - sum(lengths)
    return [document for document, length in enumerate(lengths) for _ in range(length)]


def _text_before_padding(tokens: list[int], pad: int, lengths: list[int] | None) -> int:
    if lengths is not None:
        return min(sum(lengths), len(tokens))
    count = len(tokens)
    while count and tokens[count - 1] == pad:
        count -= 1
    return count
