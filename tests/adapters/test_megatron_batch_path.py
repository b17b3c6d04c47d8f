"""What each rank of TP=2 x PP=2 gets, and what it is told when it cannot be given anything: the same on every rank."""

from __future__ import annotations

import json

import pytest

from tests.adapters.launching import HERE, make_corpus, run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is a test dependency")


def test_every_stage_gets_its_keys_in_every_place(tmp_path):
    make_corpus(tmp_path / "corpus", num_documents=200)
    make_corpus(tmp_path / "other", num_documents=90, seed=8)
    arguments = [
        "--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2", "--micro-batch-size=2",
        "--global-batch-size=4", "--seq-length=16", "--train-iters=20", "--eval-iters=4", "--eval-interval=10",
        "--split=70,20,10", "--data-path", "70", f"{tmp_path / 'corpus'}", "30", f"{tmp_path / 'other'}",
        "--no-create-attention-mask-in-dataloader", "--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss",
        "--enable-share-memory",
    ]  # fmt: skip
    ranks = run_ranks(HERE / "batch_rank.py", arguments, folder=tmp_path, num_ranks=4, adapter=False)
    assert [rank.status for rank in ranks] == [0] * 4, "\n".join(rank.errors for rank in ranks)


TOLD = {
    "no iterator on the reading rank": ("ConfigError", "rank 0 is to write", "no iterator"),
    "an iterator elsewhere": ("ConfigError", "only rank 0 writes", "ranks [1]"),
    "no iterator later": ("ConfigError", "rank 0 reads", "no data iterator", "micro batch 1"),
    "an iterator elsewhere later": ("ConfigError", "only rank 0 reads", "rank 1 was given a data iterator too"),
    "ends early": ("SourceError", "rank 0 ended before micro batch 2", "--train-iters"),
    "the iterator raises": ("SourceError", "OSError: the disk is gone"),
    "another shape": ("ConfigError", "micro batch 1", "tokens of shape [1, 5]", "[1, 4]"),
    "labels of another shape": ("ConfigError", "micro batch 0", "labels of shape [1, 3]"),
    "another field": ("ConfigError", "cu_seqlens", "absent in the first batch"),
    "positions that do not count": ("ConfigError", "micro batch 0", "--reset-position-ids"),
    "no labels": ("ConfigError", "micro batch 0 has no labels, loss_mask"),
    "no dict": ("ConfigError", "micro batch 0 is a Tensor"),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[dict[str, str]]:
    ranks = run_ranks(HERE / "refusing_rank.py", [], folder=tmp_path_factory.mktemp("refused"), adapter=False)
    assert [rank.status for rank in ranks] == [0, 0], "\n".join(rank.errors for rank in ranks)
    return [json.loads(rank.output.splitlines()[-1]) for rank in ranks]


@pytest.mark.parametrize("case", TOLD)
def test_every_rank_is_told_what_is_wrong(told, case):
    for rank in told:
        assert all(words in rank[case] for words in TOLD[case]), rank[case]


SHARE = ["--tensor-model-parallel-size=2", "--reset-attention-mask"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["only:1:--enable-share-memory"], "--enable-share-memory"),
        (["--enable-share-memory", "only:0:--reset-position-ids"], "--reset-position-ids"),
    ],
    ids=["the flag on one rank", "other positions on one rank"],
)
def test_ranks_started_differently_are_all_told(tmp_path, extra, words):
    ranks = run_ranks(HERE / "started_rank.py", [*SHARE, *extra], folder=tmp_path, adapter=False)
    for rank in ranks:
        assert rank.status == 1
        assert "ConfigError: all ranks must be started with the same flags" in rank.errors
        assert words in rank.errors.splitlines()[-1]
        assert "rank 0 has" in rank.errors
        assert "rank 1 " in rank.errors


@pytest.mark.parametrize("extra", [[], ["--enable-share-memory"]])
def test_the_batch_path_is_replaced_with_the_flag_and_only_then(tmp_path, extra):
    ranks = run_ranks(HERE / "started_rank.py", [*SHARE, *extra], folder=tmp_path, num_ranks=1)
    assert ranks[0].output == f"started {[not extra] * 2}\n", ranks[0].errors
