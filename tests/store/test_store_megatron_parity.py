"""The same bytes as megatron-core, both ways: each reads what the other wrote."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.store import StoreWriter, TokenStore, optimal_dtype

indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="needs megatron-core 0.16.1")

documents = st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=3), min_size=1, max_size=6).filter(
    lambda corpus: any(sequence for document in corpus for sequence in document)  # Megatron cannot map an empty .bin
)


@given(corpus=documents, dtype=st.sampled_from(["uint8", "int8", "int16", "uint16", "int32", "int64"]))
@settings(max_examples=150)
def test_both_write_the_same_bytes_and_read_each_other(
    tmp_path_factory: pytest.TempPathFactory, corpus: list, dtype: str
) -> None:
    folder = tmp_path_factory.mktemp("parity")
    theirs = indexed_dataset.IndexedDatasetBuilder(str(folder / "theirs.bin"), dtype=getattr(np, dtype))
    with StoreWriter(folder / "ours", dtype) as ours:
        for document in corpus:
            flat, lengths = np.array([*chain(*document)], np.int64), [len(sequence) for sequence in document]
            ours.add_document(flat, lengths)
            theirs.add_document(flat, lengths)
    theirs.finalize(str(folder / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (folder / f"ours.{suffix}").read_bytes() == (folder / f"theirs.{suffix}").read_bytes()

    by_them = indexed_dataset.IndexedDataset(str(folder / "ours"))
    by_us = TokenStore(folder / "theirs")
    assert len(by_them) == len(by_us)
    for i in range(len(by_us)):
        assert by_them[i].tolist() == by_us.read(i).tolist()
        if length := int(by_us.lengths[i]):
            assert by_them.get(i, length - 1, 1).tolist() == by_us.read(i, length - 1, 1).tolist()


@pytest.mark.parametrize("vocab_size", [None, 1, 65499, 65500, 65535, 65536, 100_000])
def test_both_choose_the_same_dtype(vocab_size: int | None) -> None:
    assert optimal_dtype(vocab_size) == np.dtype(indexed_dataset.DType.optimal_dtype(vocab_size))
