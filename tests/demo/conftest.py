"""Small corpora for the demo."""

from pathlib import Path

import numpy as np
import pytest

from headrace.store import StoreWriter

EOD = 0
VOCAB_SIZE = 500


@pytest.fixture(scope="session")
def documents() -> list[list[int]]:
    """Token ids of documents that end with EOD: from a token or two to several samples long."""
    random = np.random.default_rng(7)
    lengths = np.exp(random.normal(3.0, 1.2, 400)).astype(int) + 1
    return [[*random.integers(1, VOCAB_SIZE, length).tolist(), EOD] for length in lengths]


@pytest.fixture(scope="session")
def prefix(documents: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Those documents as a token store."""
    path: Path = tmp_path_factory.mktemp("corpus") / "documents"
    with StoreWriter(path, "uint16") as writer:
        for document in documents:
            writer.add_document(np.array(document, np.uint16))
    return str(path)
