"""What TokenStore hands out, and every damaged pair it must refuse with a sentence that names file, need and have."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError, FormatError
from headrace.store import StoreWriter, TokenStore

DOCUMENTS = [[1, 2, 3], [4, 5], [], [6, 7, 8, 9]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    with StoreWriter(tmp_path / "corpus", np.uint16) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    return tmp_path / "corpus"


def test_counts_and_lengths(prefix: Path) -> None:
    with TokenStore(prefix) as store:
        assert (store.num_documents, store.num_sequences, len(store), store.num_tokens) == (4, 3, 3, 9)
        assert store.lengths.tolist() == [3, 2, 4]
        assert store.lengths.dtype == np.int32
        assert store.document_boundaries.tolist() == [0, 1, 2, 2, 3]
        assert store.token_id_range == (1, 9)


def test_a_file_of_the_pair_names_the_pair_too(prefix: Path) -> None:
    assert TokenStore(f"{prefix}.idx").num_tokens == TokenStore(f"{prefix}.bin").num_tokens == 9


def test_parts_of_a_sequence_as_views_and_as_copies(prefix: Path) -> None:
    store = TokenStore(prefix)
    assert store.read(2).tolist() == [6, 7, 8, 9]
    assert store.read(2, 1).tolist() == [7, 8, 9]
    assert store.read(2, 1, 2).tolist() == [7, 8]
    assert store.read(2, 4).tolist() == []
    row = np.zeros(5, np.uint16)
    assert store.read_into(row, 2, 1, 2) == 2
    assert store.read_into(row[2:], 0) == 3
    assert row.tolist() == [7, 8, 1, 2, 3]
    assert store.read_into(row[5:], 0, 3) == 0


def test_a_view_outlives_the_closed_store_and_cannot_be_written(prefix: Path) -> None:
    store = TokenStore(prefix)
    view = store.read(0)
    store.close()
    store.close()
    assert view.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 7
    with pytest.raises(ValueError, match="read-only"):
        store.lengths[0] = 7


def test_rows_of_a_wider_dtype_are_filled_and_of_a_narrower_one_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "wide", np.int32) as writer:
        writer.add_document([70000, 3])
    store = TokenStore(tmp_path / "wide")
    row = np.zeros(2, np.int64)
    store.read_into(row, 0)
    assert row.tolist() == [70000, 3]
    with pytest.raises(ConfigError, match=r"holds int32, which does not fit into uint16 rows"):
        store.read_into(np.zeros(2, np.uint16), 0)


@pytest.mark.parametrize(("sequence", "offset", "length"), [(3, 0, 1), (-1, 0, 1), (0, -1, 2), (0, 0, 4), (0, 4, None)])
def test_tokens_that_do_not_exist_are_refused(prefix: Path, sequence: int, offset: int, length: int | None) -> None:
    store = TokenStore(prefix)
    with pytest.raises(ConfigError, match="asked for"):
        store.read(sequence, offset, length)
    with pytest.raises(ConfigError, match="asked for"):
        store.read_into(np.zeros(9, np.uint16), sequence, offset, length)


def test_a_destination_without_room_is_refused(prefix: Path) -> None:
    with pytest.raises(ConfigError, match=r"room for 4 tokens, got shape \(3,\)"):
        TokenStore(prefix).read_into(np.zeros(3, np.uint16), 2)


def test_an_id_outside_the_vocabulary_is_named(prefix: Path) -> None:
    store = TokenStore(prefix)
    store.require_vocabulary(10)
    with pytest.raises(ConfigError, match="token id 9, outside a vocabulary of 9 ids"):
        store.require_vocabulary(9)


def test_a_store_without_tokens_can_be_opened(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "empty", np.uint16):
        pass
    store = TokenStore(tmp_path / "empty")
    assert (store.num_documents, store.num_sequences, store.num_tokens) == (0, 0, 0)
    assert store.token_id_range == (0, -1)
    assert len(store.fingerprint()) == 32


def test_fingerprint_follows_content_and_not_place_or_time(prefix: Path, tmp_path: Path) -> None:
    first = TokenStore(prefix).fingerprint()
    for suffix in (".bin", ".idx"):
        (tmp_path / f"copy{suffix}").write_bytes(Path(f"{prefix}{suffix}").read_bytes())
        os.utime(tmp_path / f"copy{suffix}", (1, 1))
    assert TokenStore(tmp_path / "copy").fingerprint() == first
    raw = bytearray(Path(f"{prefix}.bin").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "copy.bin").write_bytes(raw)
    assert TokenStore(tmp_path / "copy").fingerprint() != first


def test_an_open_store_keeps_its_tokens_when_the_pair_is_written_anew(prefix: Path) -> None:
    store = TokenStore(prefix)
    with StoreWriter(prefix, np.uint16) as writer:
        writer.add_document([9] * 50)
    row = np.zeros(3, np.uint16)
    store.read_into(row, 0)
    assert row.tolist() == [1, 2, 3]
    assert TokenStore(prefix).num_tokens == 50


def test_a_bin_truncated_under_an_open_store_is_an_error_and_no_signal(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "big", np.uint16) as writer:
        writer.add_document(np.arange(40_000, dtype=np.uint16))
    store = TokenStore(tmp_path / "big")
    os.truncate(tmp_path / "big.bin", 4096)
    row = np.zeros(40_000, np.uint16)
    assert store.read_into(row, 0, 0, 2048) == 2048
    with pytest.raises(FormatError, match=r"big\.bin has become shorter than its index says: 80,000 bytes needed"):
        store.read_into(row, 0)


# Damage, one kind at a time. Offsets: magic 0, version 9, dtype 17, sequences 18, boundaries 26, lengths 34,
# pointers 34 + 12, boundaries 34 + 12 + 24.


def _patch(at: int, form: str, value: object) -> Callable[[bytearray], bytes]:
    def patched(raw: bytearray) -> bytes:
        struct.pack_into(form, raw, at, value)
        return bytes(raw)

    return patched


DAMAGED_INDEX = {
    "empty": (lambda raw: b"", r"corpus\.idx is no token store index: it has 0 bytes, its header alone needs 34"),
    "half a header": (lambda raw: bytes(raw[:20]), "it has 20 bytes"),
    "magic": (_patch(0, "<B", 0), "starts with"),
    "version": (_patch(9, "<Q", 2), "format version 2, only version 1"),
    "dtype code": (_patch(17, "<B", 9), "unknown dtype code 9"),
    "float tokens": (_patch(17, "<B", 7), r"dtype code 7 \(float32\): token ids must be integers"),
    "too many sequences": (_patch(18, "<Q", 4), "truncated: 4 sequences and 5 document boundaries need 122 bytes"),
    "absurd counts": (_patch(18, "<Q", 2**63), "truncated"),
    "no boundary": (_patch(26, "<Q", 0), "0 document boundaries, at least 1"),
    "truncated": (lambda raw: bytes(raw[:-1]), "truncated.*need 110 bytes, it has 109"),
    "trailing bytes": (lambda raw: bytes(raw + b"\0"), "longer than its header explains"),
    "negative length": (_patch(34, "<i", -1), "sequence 0 has length -1"),
    "length too long": (_patch(42, "<i", 5), r"corpus\.bin is too short: .*corpus\.idx needs 20 bytes, it has 18"),
    "overlap": (
        _patch(54, "<q", 4),
        "sequence 1 starts at byte 4, but must start on a multiple of 2 at or after byte 6",
    ),
    "between two tokens": (_patch(62, "<q", 11), "sequence 2 starts at byte 11"),
    "negative pointer": (_patch(46, "<q", -2), "sequence 0 starts at byte -2"),
    "pointer far outside": (_patch(62, "<q", 2**63 - 1), "too short"),
    "boundaries start late": (_patch(70, "<q", 1), "must run from 0 to 3"),
    "boundaries end early": (_patch(102, "<q", 2), "they run from 0 to 2"),
    "boundaries go back": (_patch(86, "<q", 0), "document 1 ends at sequence 0, before it starts"),
}


@pytest.mark.parametrize("kind", DAMAGED_INDEX)
def test_a_damaged_index_is_refused(prefix: Path, kind: str) -> None:
    damage, message = DAMAGED_INDEX[kind]
    path = Path(f"{prefix}.idx")
    path.write_bytes(damage(bytearray(path.read_bytes())))
    with pytest.raises(FormatError, match=message):
        TokenStore(prefix)


def test_a_short_bin_is_refused(prefix: Path) -> None:
    os.truncate(f"{prefix}.bin", 17)
    with pytest.raises(FormatError, match=r"corpus\.bin is too short: .*needs 18 bytes, it has 17"):
        TokenStore(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_file_is_named(prefix: Path, suffix: str) -> None:
    os.unlink(f"{prefix}{suffix}")
    with pytest.raises(ConfigError, match=rf"corpus\{suffix} does not exist; give the path of the pair"):
        TokenStore(prefix)


def test_a_folder_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "x.idx").mkdir()
    with pytest.raises(ConfigError, match=r"x\.idx cannot be read"):
        TokenStore(tmp_path / "x")


def test_an_index_swapped_while_opening_is_noticed(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment between StoreWriter's removal of the old index and its renames."""
    real_stat = os.stat

    def removed(path: str, *args: object, **kwargs: object) -> os.stat_result:
        if str(path).endswith(".idx"):
            raise FileNotFoundError(path)
        return real_stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", removed)
    with pytest.raises(FormatError, match="being replaced by another process"):
        TokenStore(prefix)


def test_multimodal_modes_are_tolerated(prefix: Path) -> None:
    path = Path(f"{prefix}.idx")
    path.write_bytes(path.read_bytes() + b"\0\1\0")
    assert TokenStore(prefix).num_sequences == 3
