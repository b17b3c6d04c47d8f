"""Any data people have, through a feed of two ranks: the same batches, one end, their random numbers, their resume."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.feed import SourceContext
from tests.sources import people
from tests.sources.job import run_job
from tests.sources.source_rank import NUM_BEFORE, described

pytest.importorskip("torch")
pytest.importorskip("torchdata", reason="StatefulDataLoader is torchdata's")
SCRIPT = Path(__file__).with_name("source_rank.py")


def expected(name: str) -> list[dict[str, Any]]:
    """The source, read here."""
    context = SourceContext(data_rank=0, data_size=1, seed=1234)
    return json.loads(json.dumps([described(item) for item in people.SOURCES[name](context)]))


def results(folder: Path, what: str) -> list[dict[str, Any]]:
    ended = run_job(SCRIPT, [str(folder), what], folder=folder)
    assert [one.status for one in ended] == [0, 0], ended[0].errors + ended[1].errors
    return [json.loads((folder / f"{what}-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results(tmp_path_factory.mktemp("sources"), "all")


@pytest.mark.parametrize("name", people.SOURCES)
def test_every_rank_gets_what_the_source_yields_and_one_end(taken: list[dict[str, Any]], name: str) -> None:
    batches = expected(name)
    assert len({json.dumps({key: shape_of(value) for key, value in one.items()}) for one in batches}) > 1, "uneven"
    for rank in taken:
        assert rank[name] == {"batches": batches, "ended_at": len(batches), "random": True}


def shape_of(value: Any) -> list[int]:
    return [len(value), *shape_of(value[0])] if isinstance(value, list) and value else []


def test_a_killed_job_goes_on_where_the_source_was(tmp_path: Path) -> None:
    killed = run_job(SCRIPT, [str(tmp_path), "killed"], folder=tmp_path)
    assert [one.status for one in killed] == [-signal.SIGKILL] * 2, killed[0].errors + killed[1].errors
    for rank in results(tmp_path, "resumed"):
        for name in people.CAN_RESUME:
            batches = expected(name)
            assert rank[name] == {"before": batches[:NUM_BEFORE], "after": batches[NUM_BEFORE:]}
