"""What only a feed of tensors can be asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.feed.group import Group, await_end, feeders_of
from tests.feed.party import Party
from tests.shm.company import Raised
from tests.torch.feed.conftest import torch_group


@pytest.fixture
def party(four: Group) -> Party:
    return Party(four, shards=[(0, 1)] * 4, kind="process_group", writer="feeder")


@pytest.fixture(autouse=True)
def cleaned(party: Party) -> None:
    yield
    party.clean_up()


def test_a_state_goes_through_a_distributed_checkpoint(party: Party, tmp_path: Path) -> None:
    party.make(source="resumable")
    party.take(3)
    for came_back in party.group.all("save_and_load", str(tmp_path / "checkpoint")):
        assert came_back["same"]
        assert came_back["next"] == [[0, 3, 1]], "the fourth batch, drawn first"


def test_tensors_of_every_dtype_are_views_made_once(party: Party) -> None:
    party.make(source="every_dtype")
    for told in party.group.all("tensors"):
        assert told["types"] == ["Tensor"]
        assert told["dtypes"]["uint16"] == "torch.uint16"
        assert told["dtypes"]["float16"] == "torch.float16"
        assert told["dtypes"]["bool"] == "torch.bool"
        assert told["same_object"]
        assert told["device"] == "cpu"


def test_workers_of_a_data_loader_are_forked_beside_a_feed(party: Party) -> None:
    party.make(params={"num_batches": 20})
    party.take(1)
    for told in party.group.all("workers_beside"):
        assert sorted(told["seen"]) == list(range(8))
        assert told["indices"] == list(range(1, 9))
    assert party.take(12)[0][-1] == "END", "the ring outlives them"


def test_a_data_loader_with_workers_and_a_random_collate_gives_all_ranks_one_batch(party: Party) -> None:
    before = party.group.all("random_state")
    party.make(source="shuffled", module="tests.torch.feed.torch_rank")
    feeder = feeders_of(party.group)[0]
    taken = party.take_all()
    assert all(batches == taken[0] for batches in taken)
    rows = [int(row) for batch in taken[0] for row in batch["fields"]["rows"][2]]
    assert sorted(rows) == list(range(40))
    assert rows != sorted(rows)
    assert party.group.all("random_state") == before
    party.close()
    await_end(feeder)


@pytest.mark.parametrize(("what", "text"), [
    ("gradients", "field 'x' of batch 0 is no CPU array: Can't call numpy() on Tensor that requires grad"),
    ("on a device", "field 'x' of batch 0 is no CPU array"),
    ("bfloat16", "field 'x' of batch 0 is no CPU array: Got unsupported ScalarType BFloat16"),
    ("sparse", "field 'x' of batch 0 is no CPU array"),
    ("dates", "cannot be a tensor"),
    ("words", "cannot be a tensor"),
])  # fmt: skip
def test_what_cannot_be_a_tensor_in_shared_memory_is_refused(party: Party, what: str, text: str) -> None:
    error = party.error("odd_items", what)
    assert error.kind == "ConfigError"
    assert text in error.text


def test_tensors_come_as_they_are(party: Party) -> None:
    assert party.group.all("odd_items", "a tensor") == [[0, 1, 2]] * 4
    assert party.group.all("odd_items", "not contiguous") == [[[0, 3], [1, 4], [2, 5]]] * 4


SCRIPT = """
import sys
{before}
from headrace.torch import Feed
import numpy as np

def source(context):
    for index in range(3):
        yield {{"x": np.arange(index, index + 2)}}

if __name__ == "__main__":
    with Feed(source) as feed:
        for batch in feed:
            print(batch["x"].tolist(), flush=True)
        print(feed.state_dict()["source"])
else:
    raise SystemExit("the script was run again")
"""


def run_script(tmp_path: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT.format(before=before))
    return subprocess.run(
        [sys.executable, "scripts/train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_source_of_the_script_itself_goes_by_value_and_the_folder_hides_nothing(tmp_path: Path) -> None:
    """A feeder that looked into the current folder first would take its `socket.py` for the standard library's."""
    (tmp_path / "socket.py").write_text("raise SystemExit('not the module you are looking for')")
    ended = run_script(tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["[0, 1]", "[1, 2]", "[2, 3]", "__main__.source"]


def test_without_cloudpickle_a_source_of_the_script_is_refused_by_name(tmp_path: Path) -> None:
    ended = run_script(tmp_path, before="sys.modules['cloudpickle'] = None")
    assert ended.returncode == 1
    assert (
        "ConfigError: the source source is defined in __main__, which the feeder process cannot import; "
        in ended.stderr
    )
    assert "pip install 'headrace[sources]'" in ended.stderr


def test_the_store_of_a_dead_rank_0_is_missed_while_a_feed_is_made() -> None:
    """Without an elastic launcher the store of torch.distributed lives in rank 0."""
    group = torch_group(2)
    try:
        for rank in group.ranks:
            assert rank.pid
        facts = {"address": "", "ranks": [0, 1], "rank": 1}
        group.ranks[1].begin_call("make", "feed", **facts)
        os.kill(group.ranks[0].pid, signal.SIGKILL)
        with pytest.raises(Raised) as caught:
            group.ranks[1].answer()
        assert caught.value.kind == "PeerGone"
        assert "the process that holds torch.distributed's store" in caught.value.text
    finally:
        group.disband()
