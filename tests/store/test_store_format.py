"""The bytes of the format are frozen: golden bytes by hand, and files whose hashes came out of megatron-core."""

import hashlib
import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.store import StoreWriter, TokenStore, optimal_dtype
from headrace.store.format import storable

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "gpt_dataset.json").read_text())

GOLDEN_BIN = "01 00 02 00 03 00 04 00 05 00"
GOLDEN_IDX = """
4d 4d 49 44 49 44 58 00 00
01 00 00 00 00 00 00 00
08
02 00 00 00 00 00 00 00
03 00 00 00 00 00 00 00
03 00 00 00 02 00 00 00
00 00 00 00 00 00 00 00 06 00 00 00 00 00 00 00
00 00 00 00 00 00 00 00 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00 00
"""


def test_two_documents_have_these_bytes(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "v13", np.uint16) as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([4, 5])
    assert (tmp_path / "v13.bin").read_bytes() == bytes.fromhex(GOLDEN_BIN)
    assert (tmp_path / "v13.idx").read_bytes() == bytes.fromhex(GOLDEN_IDX)
    assert len(bytes.fromhex(GOLDEN_IDX)) == 82


@pytest.mark.parametrize("case", VECTORS["indexed_files"], ids=lambda case: case["name"])
def test_files_equal_those_of_megatron_core(case: dict, tmp_path: Path) -> None:
    cuts = case.get("documents_as_sequences", {})
    with StoreWriter(tmp_path / "case", case["dtype"]) as writer:
        for number, document in enumerate(case["documents"]):
            writer.add_document(document, cuts.get(str(number)))
    for suffix, expected in case["files"].items():
        raw = (tmp_path / f"case.{suffix}").read_bytes()
        assert len(raw) == expected["bytes"]
        assert hashlib.sha256(raw).hexdigest() == expected["sha256"]

    store = TokenStore(tmp_path / "case")
    assert store.dtype == np.dtype(case["dtype"])
    assert store.lengths.tolist() == case["sequence_lengths"]
    assert store.document_boundaries.tolist() == case["document_indices"]
    assert [token for i in range(len(store)) for token in store.read(i)] == list(chain(*case["documents"]))


def test_dtype_choice_is_that_of_megatron_at_its_edges() -> None:
    assert optimal_dtype(65499) == np.uint16
    assert optimal_dtype(65500) == np.int32
    assert optimal_dtype(65536) == np.int32
    assert optimal_dtype(None) == np.int32


def test_dtypes_without_a_code_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="float32; choose one of int16"):
        storable(np.float32)
    with pytest.raises(ConfigError, match="uint32"):
        storable(np.uint32)
