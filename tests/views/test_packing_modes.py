"""A token store as a source, in every packing mode: what the rows hold, counted against the documents themselves."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from headrace import PackedTokens
from headrace.errors import ConfigError
from headrace.feed import Feed
from headrace.packing import View
from headrace.store import StoreWriter

PAD = 0
LENGTHS = [3, 30, 7, 12, 1, 16, 40, 5, 9, 22, 2, 16, 4]


@pytest.fixture
def documents():
    """Every token occurs once, so that a batch says where its tokens are from."""
    ends = np.cumsum([0, *LENGTHS])
    return [np.arange(start + 1, end + 1) for start, end in pairwise(ends)]


def write(path, documents, dtype=np.uint16):
    with StoreWriter(path, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return str(path)


@pytest.fixture
def corpus(tmp_path, documents):
    return write(tmp_path / "corpus", documents)


def all_batches(source, **shard):
    batches = source.open_batches(**shard)
    try:
        return [batches[index] for index in range(len(batches))]
    finally:
        batches.close()


def segments(batch):
    """The documents of a batch as they are laid out, and the targets of each."""
    ends = batch["cu_seqlens"]
    tokens, labels = batch["tokens"].ravel(), batch["labels"].ravel()
    mask, positions = batch["loss_mask"].ravel(), batch["position_ids"].ravel()
    for start, end in pairwise(ends):
        assert positions[start:end].tolist() == list(range(end - start))
        yield tokens[start:end], labels[start:end], mask[start:end]


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
def test_whole_documents(corpus, documents, extra, rows):
    source = PackedTokens(
        corpus, seq_length=16, micro_batch_size=rows, documents="whole", pad=PAD, add_extra_token=extra
    )
    batches = all_batches(source)
    seen = Counter()
    for batch in batches:
        for tokens, labels, mask in segments(batch):
            real = tokens[tokens != PAD]
            seen.update(real.tolist())
            kept = mask.astype(bool)
            inner = real.size - 1
            assert (labels[:inner] == real[1:]).all()
            assert kept[:inner].all()
            assert not kept[real.size :].any(), "padding is no target"
    assert max(seen.values()) == 1, "no token is an input twice"
    if rows == 1:
        order = source.open_batches()._order
        whole = {part.document for row in range(len(order)) for part in order.parts(row) if part.offset == 0}
        assert whole == set(range(len(documents)))
        assert sum(part.length for row in range(len(order)) for part in order.parts(row)) >= sum(LENGTHS)


def test_padding_is_counted_not_guessed(corpus):
    """Documents of one token are documents; the true length of a row is known without looking for pads."""
    source = PackedTokens(corpus, seq_length=16, documents="whole", pad=PAD, add_extra_token=False)
    with Feed(source) as feed:
        counted = [(batch.num_valid_tokens, int((batch["tokens"] != PAD).sum())) for batch in feed]
    assert all(valid == real for valid, real in counted)
    assert any(valid < 16 for valid, _ in counted)
    assert sum(valid for valid, _ in counted) == sum(LENGTHS)


@pytest.mark.parametrize("extra", [True, False])
def test_padded_documents_are_cut_without_more_padding(corpus, extra):
    source = PackedTokens(corpus, seq_length=16, documents="whole", pad_documents_to=4, pad=PAD, add_extra_token=extra)
    for batch in all_batches(source):
        assert (np.diff(batch["cu_seqlens"]) % 4 == 0).all()
    tokens = [[], []]
    valid = 0
    for rank in range(2):
        with Feed(source, view=View(cp_size=2, cp_rank=rank)) as feed:
            for batch in feed:
                assert batch["tokens"].shape == (1, 8), "every part has one length"
                assert batch["cu_seqlens_padded"].tolist() == batch["cu_seqlens"].tolist()
                tokens[rank] += batch["tokens"].ravel().tolist()
                valid += batch.num_valid_tokens
    real = [token for part in tokens for token in part if token != PAD]
    assert len(real) == len(set(real))
    assert valid == 2 * len(real)


def test_targets_of_their_own(tmp_path, corpus, documents):
    targets = [np.where(np.arange(len(document)) < len(document) // 2, -100, document) for document in documents]
    prefix = write(tmp_path / "targets", targets, np.int32)
    learnt = Counter()
    source = PackedTokens(corpus, seq_length=48, documents="whole", pad=PAD, targets=prefix, micro_batch_size=1)
    for batch in all_batches(source):
        for tokens, labels, mask in segments(batch):
            kept = mask.astype(bool)
            learnt.update(labels[kept].tolist())
            assert (labels[kept] == tokens[kept] + 1).all(), "a target is the next token of its own document"
    expected = [
        token for document, target in zip(documents, targets, strict=True) for token in document[1:][target[1:] > 0]
    ]
    assert learnt == Counter(expected)
    cut = PackedTokens(corpus, seq_length=16, targets=prefix)
    for batch in all_batches(cut):
        kept = batch["loss_mask"] == 1
        assert (batch["labels"][kept] == batch["tokens"][kept] + 1).all()
        assert kept.any()


def test_rows_as_one_with_a_mask(corpus):
    plain = PackedTokens(corpus, seq_length=16, micro_batch_size=2)
    flat = PackedTokens(corpus, seq_length=16, micro_batch_size=2, flatten=True, attention_mask="dense")
    with Feed(flat) as feed:
        for batch, expected in zip(feed, all_batches(plain), strict=True):
            assert batch["tokens"].shape == (1, 32)
            assert batch["tokens"].ravel().tolist() == expected["tokens"].ravel().tolist()
            assert batch["cu_seqlens"].tolist() == expected["cu_seqlens"].tolist()
            mask = batch["attention_mask"]
            assert mask.shape == (1, 1, 32, 32)
            assert (~mask).sum() == sum(n * (n + 1) // 2 for n in np.diff(batch["cu_seqlens"]))


def test_whole_documents_resume_with_another_number_of_shards(corpus):
    source = PackedTokens(corpus, seq_length=16, documents="whole", pad=PAD, num_epochs=3)
    whole = [batch["tokens"].tolist() for batch in all_batches(source)]
    first = [batch["tokens"].tolist() for batch in all_batches(source)][:4]
    rest = [all_batches(source, data_rank=rank, data_size=2, consumed_samples=4) for rank in range(2)]
    dealt = [batch["tokens"].tolist() for turn in zip(*rest, strict=True) for batch in turn]
    assert first + dealt == whole[: 4 + len(dealt)]
    assert len(whole) - len(first) - len(dealt) < 2
    assert "whole documents padded to 1" in source.identity()
    assert source.identity() != PackedTokens(corpus, seq_length=16, num_epochs=3).identity()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"documents": "best"}, "documents must be one of cut, whole, got 'best'"),
        ({"documents": "whole", "boundaries": "eod", "eod": 3}, "need boundaries='documents', got 'eod'"),
        ({"pad_documents_to": 4}, "pad_documents_to=4 needs documents='whole'"),
        ({"documents": "whole", "pad_documents_to": 5}, "must divide the sequence length 16, got 5"),
        ({"documents": "whole", "num_samples": 9, "num_epochs": 2}, "`num_samples`, not both: got 2 and 9"),
        ({"num_samples": 9.5}, "num_samples must be a whole number, got 9.5"),
        ({"seq_length": 40_000, "attention_mask": "dense"}, "needs 1,600,000,000 bytes in every slot"),
    ],
)
def test_modes_without_a_meaning(corpus, wrong, message):
    with pytest.raises(ConfigError, match=message):
        PackedTokens(corpus, **({"seq_length": 16} | wrong)).open_batches()


def test_targets_that_do_not_fit_the_tokens(tmp_path, corpus, documents):
    with pytest.raises(
        ConfigError, match="as long as the tokens, document by document: 13 sequences of 167 tokens, 12"
    ):
        PackedTokens(corpus, seq_length=16, targets=write(tmp_path / "short", documents[1:])).open_batches()
    wide = write(tmp_path / "wide", documents, np.int64)
    with pytest.raises(ConfigError, match="targets must fit int32, the store holds int64"):
        PackedTokens(corpus, seq_length=16, targets=wide).open_batches()
