"""What Megatron's tools/preprocess_data.py makes of records, in our words and with its own builder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np


def write_as_megatron(
    prefix: Path,
    documents: Sequence[str | list[str]],
    *,
    tokenize: Callable[[str], list[int]],
    vocab_size: int,
    eod: int | None,
) -> None:
    """Sentences without tokens are left out; a document without any is added empty, and gets no end of document."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
    for document in documents:
        ids: list[int] = []
        lengths: list[int] = []
        for sentence in [document] if isinstance(document, str) else document:
            if tokens := tokenize(sentence):
                ids += tokens
                lengths.append(len(tokens))
        if ids and eod is not None:
            ids.append(eod)
            lengths[-1] += 1
        builder.add_document(np.array(ids, np.int64), lengths)
    builder.finalize(f"{prefix}.idx")
