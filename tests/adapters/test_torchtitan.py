"""torchtitan's contract for a dataloader, kept by the feed: against torchtitan itself where it is installed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace import PackedTokens
from tests.adapters.launching import make_corpus
from tests.sources.job import run_job

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests" / "sources"


def path_of_ranks() -> str:
    stand_in = [] if importlib.util.find_spec("torchtitan") else [str(SOURCES / "stand_in")]
    return ":".join([*stand_in, str(ROOT)])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("titan") / "corpus"
    make_corpus(prefix, num_documents=40)
    return prefix


@pytest.fixture(scope="module")
def found(corpus: Path) -> list[dict[str, Any]]:
    arguments = [str(corpus), str(corpus.parent / "checkpoint"), str(corpus.parent)]
    ended = run_job(SOURCES / "titan_rank.py", arguments, folder=corpus.parent, path=path_of_ranks())
    assert [one.status for one in ended] == [0, 0], ended[0].errors + ended[1].errors
    return [json.loads((corpus.parent / f"{rank}.json").read_text()) for rank in range(2)]


def expected(corpus: Path, **shard: int) -> list[dict[str, Any]]:
    source = PackedTokens(str(corpus), seq_length=32, micro_batch_size=2, layout="torchtitan")
    batches = source.open_batches(**shard)
    names = ("input", "positions", "labels")
    return [{name: batches[i][name].tolist() for name in names} for i in range(len(batches))]


def test_ranks_of_one_replica_get_the_same_batches_for_keeps(corpus: Path, found: list[dict[str, Any]]) -> None:
    whole = expected(corpus)
    assert len(whole) > 5
    for rank in found:
        assert rank["shared"] + rank["rest"] == whole
        assert rank["rng_untouched"]


def test_a_saved_loader_goes_on_after_the_last_batch_taken(corpus: Path, found: list[dict[str, Any]]) -> None:
    assert all(rank["resumed"] == expected(corpus)[3:] for rank in found)


def test_data_ranks_get_their_own(corpus: Path, found: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(found):
        assert rank["sharded"] == expected(corpus, data_rank=number, data_size=2)


def test_a_config_without_a_corpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in reversed(path_of_ranks().split(":")):
        monkeypatch.syspath_prepend(place)
    from headrace.adapters.torchtitan import FeedDataLoader

    with pytest.raises(ValueError, match="dataset_path must name"):
        FeedDataLoader.Config().build(dp_world_size=1, dp_rank=0, seq_len=8, local_batch_size=1)
    for name in [name for name in sys.modules if name.startswith(("torchtitan", "headrace.adapters.torchtitan"))]:
        monkeypatch.delitem(sys.modules, name)
