"""Cached index arrays: Megatron's are used, ours are used by Megatron, and nothing damaged or foreign is believed."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.order import IndexCache, MegatronNames, MegatronOrder, OrderRules, blend_megatron
from headrace.store import StoreWriter

LENGTHS = np.random.default_rng(5).integers(1, 40, 60).astype(np.int32)
RULES = OrderRules(sequence_length=16, seed=3, num_samples=150, split="90,10")
NAMES = MegatronNames(dataset_path="data/corpus", tokenizer={"class": "Null", "path": "nowhere/tokenizer.json"})
SUFFIXES = ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")


def assert_equal(one: MegatronOrder, other: MegatronOrder) -> None:
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert getattr(one, name).dtype == getattr(other, name).dtype
        assert np.array_equal(getattr(one, name), getattr(other, name))


@pytest.fixture(params=["own names", "Megatron's names"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> IndexCache:
    return IndexCache(tmp_path / "indices", NAMES if request.param == "Megatron's names" else None)


def files(cache: IndexCache) -> list[Path]:
    return sorted(cache.folder.iterdir())


def test_the_second_start_finds_what_the_first_one_built(cache: IndexCache) -> None:
    first = MegatronOrder(LENGTHS, RULES, cache=cache)
    second = MegatronOrder(LENGTHS, RULES, cache=cache)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert_equal(first, second)
    assert_equal(first, MegatronOrder(LENGTHS, RULES))
    assert [path.name.split("-train-")[1] for path in files(cache)] == list(SUFFIXES)


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
@pytest.mark.parametrize(
    "damage", ["missing", "empty", "torn", "other numbers", "other dtype", "out of range", "folder"]
)
def test_a_damaged_array_is_built_again(cache: IndexCache, suffix: str, damage: str) -> None:
    intact = MegatronOrder(LENGTHS, RULES, cache=cache)
    path = next(path for path in files(cache) if path.name.endswith(suffix))
    content = path.read_bytes()
    array = np.load(path)
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "torn":
        os.truncate(path, len(content) - 3)
    elif damage == "other numbers":
        array[3] = array[4]
        np.save(path, array)
    elif damage == "other dtype":
        np.save(path, array.astype(np.float64))
    elif damage == "out of range":
        array[3] = 10**6
        np.save(path, array)
    else:
        path.unlink()
        path.mkdir()
    again = MegatronOrder(LENGTHS, RULES, cache=cache)
    assert not again.from_cache
    assert_equal(again, intact)
    if damage != "folder":
        assert path.read_bytes() == content
        assert MegatronOrder(LENGTHS, RULES, cache=cache).from_cache


def test_an_order_of_another_corpus_or_other_flags_is_not_believed(cache: IndexCache) -> None:
    """Megatron's names do not tell them apart."""
    MegatronOrder(LENGTHS, RULES, cache=cache)
    for lengths, rules in (
        (LENGTHS[::-1].copy(), RULES),
        (LENGTHS + np.int32(1), RULES),
        (LENGTHS, replace(RULES, add_extra_token=False)),
    ):
        order = MegatronOrder(lengths, rules, cache=cache)
        assert not order.from_cache
        assert_equal(order, MegatronOrder(lengths, rules))


def test_every_rule_has_files_of_its_own(cache: IndexCache) -> None:
    for rules in (RULES, replace(RULES, seed=4), replace(RULES, num_samples=151), replace(RULES, split=None)):
        assert not MegatronOrder(LENGTHS, rules, cache=cache).from_cache
    assert len(files(cache)) == 4 * len(SUFFIXES)


def test_an_unwritable_folder_costs_the_cache_and_nothing_else(
    cache: IndexCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.folder.write_text("a file where a folder should be")
    order = MegatronOrder(LENGTHS, RULES, cache=cache)
    assert not order.from_cache
    assert_equal(order, MegatronOrder(LENGTHS, RULES))
    assert "index arrays are not cached in" in caplog.text


NOBODY = 65534


def test_another_users_folder_is_read_but_not_written(cache: IndexCache, caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory() as home:  # pytest's own folders can only be entered by their owner
        os.chmod(home, 0o755)
        theirs = IndexCache(Path(home) / "indices", cache.names)
        MegatronOrder(LENGTHS, RULES, cache=theirs)
        os.chmod(theirs.folder, 0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(NOBODY)
        try:
            assert MegatronOrder(LENGTHS, RULES, cache=theirs).from_cache
            assert not MegatronOrder(LENGTHS, replace(RULES, seed=9), cache=theirs).from_cache
        finally:
            if root:
                os.seteuid(0)
        assert len(files(theirs)) == len(SUFFIXES)
        os.chmod(theirs.folder, 0o755)
    assert "Permission denied" in caplog.text


def test_many_at_once_leave_one_good_set(cache: IndexCache) -> None:
    with ThreadPoolExecutor(8) as pool:
        orders = list(pool.map(lambda _: MegatronOrder(LENGTHS, RULES, cache=cache), range(16)))
    for order in orders:
        assert_equal(order, orders[0])
    assert [path.name.split("-train-")[1] for path in files(cache)] == list(SUFFIXES)
    assert MegatronOrder(LENGTHS, RULES, cache=cache).from_cache


def test_nothing_is_left_when_the_disk_is_full(cache: IndexCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert not MegatronOrder(LENGTHS, RULES, cache=cache).from_cache
    assert files(cache) == []


@pytest.mark.parametrize("split", ["90,10", "969,30,1", "0,1,0"])
@pytest.mark.parametrize("num_samples", [None, 150])
def test_megatron_and_we_use_each_others_files(tmp_path: Path, split: str, num_samples: int | None) -> None:
    from .oracle import TOKENIZER, Documents, Split, config, gpt_dataset

    settings = config(
        blend=(["p"], None), sequence_length=16, random_seed=3, split=split, path_to_cache=str(tmp_path / "indices")
    )
    part = [fractions is not None for fractions in settings.split_matrix].index(True)
    rules = OrderRules(sequence_length=16, seed=3, num_samples=num_samples, split=split, split_name=Split(part).name)
    cache = IndexCache(tmp_path / "indices", MegatronNames(dataset_path="p", tokenizer=TOKENIZER.unique_identifiers))

    def megatron() -> object:
        documents = np.arange(*(round(f * 60.0) for f in settings.split_matrix[part]), dtype=np.int32)
        return gpt_dataset.GPTDataset(Documents(LENGTHS), "p", documents, num_samples, Split(part), settings)

    megatron()
    written_by_megatron = {path.name: path.read_bytes() for path in files(cache)}
    assert MegatronOrder(LENGTHS, rules, cache=cache).from_cache
    for path in files(cache):
        path.unlink()
    assert not MegatronOrder(LENGTHS, rules, cache=cache).from_cache
    assert {path.name: path.read_bytes() for path in files(cache)} == written_by_megatron
    before = [path.stat().st_mtime_ns for path in files(cache)]
    assert np.array_equal(megatron().shuffle_index, MegatronOrder(LENGTHS, rules).shuffle_index)
    assert [path.stat().st_mtime_ns for path in files(cache)] == before, "Megatron built anew: it did not find ours"


def test_two_nodes_with_folders_of_their_own_agree_without_a_word(tmp_path: Path) -> None:
    orders = [MegatronOrder(LENGTHS, RULES, cache=IndexCache(tmp_path / node, NAMES)) for node in ("a", "b")]
    assert_equal(*orders)
    assert not any(order.from_cache for order in orders)


@pytest.mark.parametrize(("weights", "num_samples"), [([3.0, 1.0], 200), (None, 40), (None, None)])
def test_a_blend_is_kept_and_checked_too(
    tmp_path: Path, weights: list[float] | None, num_samples: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpora = [LENGTHS, LENGTHS[:25].copy()]
    rules = replace(RULES, split=None, num_samples=num_samples)
    caches = [IndexCache(tmp_path / "indices")] * 2
    first = blend_megatron(corpora, rules, weights=weights, caches=caches)
    with monkeypatch.context() as patched:
        patched.setattr(caches[0], "write", None)
        second = blend_megatron(corpora, rules, weights=weights, caches=caches)
    assert np.array_equal(first.corpus_index, second.corpus_index)

    paths = [
        path for path in files(caches[0]) if path.name.endswith(("-dataset_index.npy", "-dataset_sample_index.npy"))
    ]
    assert len(paths) == 2
    for path in paths:
        content, array = path.read_bytes(), np.load(path)
        for damaged in (array[::-1].copy(), array[:-1], array.astype(float)):
            np.save(path, damaged)
            again = blend_megatron(corpora, rules, weights=weights, caches=caches)
            assert np.array_equal(first.corpus_index, again.corpus_index)
            assert path.read_bytes() == content


@pytest.mark.parametrize(("weights", "num_samples"), [([3.0, 1.0], 200), (None, 40), (None, None)])
def test_megatron_and_we_use_each_others_blends(
    tmp_path: Path, weights: list[float] | None, num_samples: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from .oracle import TOKENIZER, dataset_from_files

    prefixes = []
    for name, lengths in (("a", LENGTHS), ("b", LENGTHS[:25])):
        prefixes.append(str(tmp_path / name))
        with StoreWriter(prefixes[-1], np.uint16) as writer:
            for length in lengths:
                writer.add_document(np.zeros(length, np.uint16))
    folder = tmp_path / "indices"
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)  # Megatron asks without having started it

    def megatron() -> object:
        return dataset_from_files(
            prefixes, weights, num_samples, split="1", sequence_length=16, random_seed=3, path_to_cache=str(folder)
        )[0]

    def ours() -> object:
        names = [MegatronNames(dataset_path=prefix, tokenizer=TOKENIZER.unique_identifiers) for prefix in prefixes]
        rules = OrderRules(sequence_length=16, seed=3, num_samples=num_samples, split="1")
        caches = [IndexCache(folder, of) for of in names]
        return blend_megatron([LENGTHS, LENGTHS[:25].copy()], rules, weights=weights, caches=caches)

    megatron()
    written_by_megatron = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(written_by_megatron) == 2 * 4 + 3
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert all(order.from_cache for order in ours().orders)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == times, "we built anew"
    for path in folder.iterdir():
        path.unlink()
    ours()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == written_by_megatron
