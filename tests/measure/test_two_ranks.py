"""Two gloo ranks: what is seen of communication, who is named slow, and a batch size both agree on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.measure.job import join_ranks
from headrace.measure.record import read_run

pytest.importorskip("torch")
PROGRAM = Path(__file__).with_name("two_ranks.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of the two ranks wrote, and where the records are."""
    folder = tmp_path_factory.mktemp("two_ranks")
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                PROGRAM,
                str(rank),
                "2",
                folder / "rendezvous",
                folder / "records",
                folder / f"{rank}.json",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = []
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0, 7], "\n".join(outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], folder / "records"


def test_the_slow_rank_is_named_by_both_although_all_step_times_are_equal(ranks):
    found, _ = ranks
    for rank in found:
        verdict = rank["slow_rank"]["verdict"]
        assert verdict["rank"] == 1, verdict
        assert verdict["persistence"] >= 0.7
    assert found[0]["slow_rank"]["communication_s"] > found[1]["slow_rank"]["communication_s"]


def test_records_of_both_ranks_make_one_job(ranks):
    found, records = ranks
    assert found[0]["slow_rank"]["run"] == found[1]["slow_rank"]["run"]
    job = join_ranks(read_run(records))
    assert job.num_ranks == job.recorded_facts.world_size == 2
    assert all(step.tokens == 2 * 64 for step in job.steps)
    assert job.summary().num_steps == 30
    assert job.notes == ()
    assert any(window.slow_rank and window.slow_rank.rank == 1 for one in read_run(records) for window in one.windows)


def test_only_rank_0_prints(ranks):
    assert [rank["slow_rank"]["lines"] for rank in ranks[0]] == [8, 0]


def test_wrapped_collectives_give_what_they_gave_and_count(ranks):
    for rank, found in enumerate(ranks[0]):
        seen = found["collectives"]
        assert seen["asynchronous"]["result"] == [[2.0] * 4, True]
        assert seen["point_to_point"]["result"] == [float(1 - rank)] * 2
        assert seen["objects"]["result"] == [{"rank": 0}, {"rank": 1}]
        assert seen["dtensor"]["result"] == [0.0, 1.0, 2.0, 3.0]
        assert all(seen[name]["ns"] > 0 for name in ("asynchronous", "point_to_point", "objects", "dtensor"))
        assert seen["nothing"]["ns"] == 0, "the wrapper is there and nothing was called: that is a zero"


def test_the_wrappers_are_gone_after_the_run(ranks):
    assert all(rank["slow_rank"]["unwrapped_again"] for rank in ranks[0])


def test_what_is_issued_below_python_or_by_other_threads_is_none_with_the_reason(ranks):
    for rank in ranks[0]:
        assert rank["below_python"]["mean_s"] is None
        assert "DistributedDataParallel" in rank["below_python"]["reason"]
        assert "other threads" in rank["from_another_thread"]


def test_ranks_agree_on_the_smallest_before_each_next_size(ranks):
    first, second = (rank["batch_sizes"] for rank in ranks[0])
    assert first == second
    assert first["largest"] == 80
    assert first["ran"] == [16, 32, 64, 128, 96, 80]


def test_a_rank_that_dies_in_the_search_is_a_named_error_not_a_hang(ranks):
    assert "a rank left the search" in ranks[0][0]["a_rank_dies"]
    assert "a_rank_dies" not in ranks[0][1]
