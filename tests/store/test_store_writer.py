"""StoreWriter: what goes in comes out, and a pair appears as a whole or not at all."""

import os
import resource
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.store import StoreWriter, TokenStore

DTYPES = ["uint8", "int8", "int16", "uint16", "int32", "int64"]


@st.composite
def corpora(draw: st.DrawFn) -> tuple[str, list[list[list[int]]]]:
    """A dtype and documents made of sequences of ids that fit it."""
    dtype = draw(st.sampled_from(DTYPES))
    limits = np.iinfo(dtype)
    sequence = st.lists(st.integers(int(limits.min), int(limits.max)), max_size=6)
    return dtype, draw(st.lists(st.lists(sequence, max_size=3), max_size=8))


@given(corpora())
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, corpus: tuple) -> None:
    dtype, documents = corpus
    prefix = tmp_path_factory.mktemp("round") / "trip"
    with StoreWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array([*chain(*document)], dtype), [len(sequence) for sequence in document])
        counts = (writer.num_documents, writer.num_sequences, writer.num_tokens)
    with TokenStore(prefix) as store:
        assert (store.num_documents, store.num_sequences, store.num_tokens) == counts
        bounds = store.document_boundaries
        read = [[store.read(i).tolist() for i in range(bounds[d], bounds[d + 1])] for d in range(store.num_documents)]
        assert read == documents
        ids = [*chain(*chain(*documents))]
        assert store.token_id_range == ((min(ids), max(ids)) if ids else (0, -1))


def write_and_raise(prefix: Path, error: type[BaseException]) -> None:
    with StoreWriter(prefix) as writer:
        writer.add_document([7])
        raise error


def test_nothing_is_left_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_and_raise(tmp_path / "corpus", KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []


def test_an_older_pair_survives_a_failed_writer(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "corpus") as writer:
        writer.add_document([1, 2])
    with pytest.raises(RuntimeError):
        write_and_raise(tmp_path / "corpus", RuntimeError)
    assert TokenStore(tmp_path / "corpus").read(0).tolist() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx"]


def test_nothing_is_left_when_publishing_itself_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match="No space left on device; choose a prefix"), StoreWriter(tmp_path / "corpus"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_tokens", [1000, 100_000])
def test_nothing_is_left_when_there_is_no_room_for_the_tokens(tmp_path: Path, num_tokens: int) -> None:
    """The process may write 512 bytes per file: at once, or when what is buffered goes to the disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        with pytest.raises(ConfigError, match="File too large; choose a prefix in a writable folder with room"):
            write_one(tmp_path / "corpus", np.zeros(num_tokens, np.int32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def write_one(prefix: Path, document: np.ndarray) -> None:
    with StoreWriter(prefix) as writer:
        writer.add_document(document)


def test_no_index_ever_describes_the_tokens_of_another_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between its two renames, the writer leaves a .bin without an index, which readers refuse by name."""
    with StoreWriter(tmp_path / "corpus") as writer:
        writer.add_document([1, 2])
    real_replace = os.replace

    def stop_at_index(source: str, target: str) -> None:
        if target.endswith(".idx"):
            raise KeyboardInterrupt
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", stop_at_index)
    with pytest.raises(KeyboardInterrupt), StoreWriter(tmp_path / "corpus") as writer:
        writer.add_document([7, 8])
    with pytest.raises(ConfigError, match=r"corpus\.idx does not exist"):
        TokenStore(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([70_000], None, "token id 70000 does not fit uint16, which holds 0 to 65535"),
        ([-1], None, "token id -1 does not fit uint16"),
        ([1, 2, 3], [1, 1], "lengths add up to 2, the document has 3 tokens"),
        ([1], [2, -1], "lengths add up to 1"),
        ([[1, 2]], None, r"1-D array of integers, got shape \(1, 2\)"),
        ([1.5], None, "integers, got shape .* float64"),
        ([2**70], None, "integers"),
    ],
)
def test_a_document_that_cannot_be_held_is_refused_and_the_writer_goes_on(
    tmp_path: Path, ids: list, lengths: list | None, message: str
) -> None:
    with StoreWriter(tmp_path / "corpus", np.uint16) as writer:
        writer.add_document([1])
        with pytest.raises(ConfigError, match=message):
            writer.add_document(ids, lengths)
        writer.add_document([2])
    store = TokenStore(tmp_path / "corpus")
    assert [store.read(i).tolist() for i in range(len(store))] == [[1], [2]]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write a token store at .*nowhere.*writable folder"):
        StoreWriter(tmp_path / "nowhere" / "corpus")
