"""One feed serves all ranks of a TP x CP x PP replica; ranks whose views would not add up are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.feed import Feed, FeedConfig
from headrace.feed.virtual_stages import virtual_stages
from headrace.packing import View, stages_of, take_view
from headrace.store import StoreWriter

REPLICA_RANK = Path(__file__).with_name("replica_rank.py")


def batches(count=4, seed=0):
    """Documents of all lengths in rows of 48."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        ends = np.unique([0, *random.integers(1, 48, 6), 48]).astype(np.int32)
        yield {
            "tokens": random.integers(1, 99, (1, 48)),
            "labels": random.integers(1, 99, (1, 48)),
            "loss_mask": np.ones((1, 48), np.float32),
            "position_ids": (np.arange(48) - np.repeat(ends[:-1], np.diff(ends)))[None].astype(np.int64),
            "cu_seqlens": ends,
        }


@pytest.fixture
def corpus(tmp_path):
    random = np.random.default_rng(5)
    with StoreWriter(tmp_path / "corpus", np.uint16) as writer:
        for length in random.integers(1, 60, 60):
            writer.add_document(random.integers(1, 1000, length))
    return tmp_path / "corpus"


@pytest.mark.usefixtures("watchdog")
def test_eight_ranks_of_a_replica_take_their_parts_from_one_slot(corpus, tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, str(REPLICA_RANK), str(corpus), str(tmp_path / "meeting")],
            env=os.environ | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(8)
    ]
    outputs = [rank.communicate() for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors for _, errors in outputs)
    facts = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    assert [fact["stage"] for fact in facts] == ["first"] * 4 + ["last"] * 4
    assert facts[0]["fields"] == ["cu_seqlens", "cu_seqlens_padded", "max_seqlen", "position_ids", "tokens"]
    assert {"mtp_tokens", "mtp_labels", "labels", "loss_mask"} <= set(facts[7]["fields"])


@pytest.mark.parametrize(
    "view",
    [
        View(cp_size=2, cp_rank=1),
        View(cp_size=2, cp_rank=0, cut="rows", stage="first"),
        View(cp_size=4, cp_rank=3, cut="contiguous"),
        View(cp_size=4, cp_rank=1, cut="hybrid", ulysses_size=2, mtp_depth=2),
        View(stage="middle"),
        View(mtp_depth=1, mtp_boundaries="moved"),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    "config", [FeedConfig(), FeedConfig(hold=2), FeedConfig(owned=True)], ids=["hold1", "hold2", "owned"]
)
def test_a_feed_hands_out_the_view(view, config):
    expected = [take_view(batch, view) for batch in batches(8)]
    recent = []
    with Feed(iterator=batches(8), writer_rank=0, view=view, config=config) as feed:
        for batch in feed:
            recent = [*recent, batch][-config.hold :]
            for one in recent:  # a batch holds as long as any other feed's
                for name, field in expected[one.index].items():
                    assert np.array_equal(one[name], field), name
                assert set(one) - {"max_seqlen"} == set(expected[one.index])
        assert batch.index == 7


def test_views_survive_slots_that_grow():
    view = View(cp_size=2, cp_rank=0)
    small, large = next(batches(1)), next(batches(1, seed=1))
    large = {name: np.tile(field, (1, 1)) for name, field in large.items() if name != "cu_seqlens"}
    large = {name: np.concatenate([field] * 4000, 1) for name, field in large.items()}
    large["cu_seqlens"] = np.arange(0, 48 * 4000 + 1, 48, dtype=np.int32)
    items = [small, large, small, large]
    with Feed(iterator=iter(items), writer_rank=0, view=view) as feed:
        for item, batch in zip(items, feed, strict=True):
            for name, field in take_view(item, view).items():
                assert np.array_equal(batch[name], field), name


def test_the_longest_document_and_the_ends_are_those_laid_out():
    with Feed(iterator=batches(1), writer_rank=0, view=View(cp_size=4)) as feed:
        batch = next(feed)
        assert batch.max_seqlen == np.diff(batch["cu_seqlens_padded"]).max() == batch["max_seqlen"]
        assert list(batch.actual_seq_len) == batch["cu_seqlens_padded"][1:].tolist()


def test_a_middle_stage_knows_its_boundaries_and_how_many_tokens_there_are_without_one():
    with Feed(iterator=batches(1), writer_rank=0, view=View(stage="middle", cp_size=2)) as feed:
        batch = next(feed)
        assert set(batch) == {"cu_seqlens", "cu_seqlens_padded", "max_seqlen"}
        assert batch["cu_seqlens"][-1] == 48
        assert batch.actual_seq_len[-1] == batch["cu_seqlens_padded"][-1] >= 48
        assert type(batch.max_seqlen) is int


class Meeting:
    """Ranks that are threads of one process."""

    def __init__(self, size):
        self.payloads, self.barrier = [b""] * size, threading.Barrier(size)

    def as_rank(self, rank):
        meeting = self

        class Rendezvous:
            def exchange(self, payload, *, timeout_s):
                meeting.payloads[rank] = payload
                meeting.barrier.wait(timeout_s)
                return list(meeting.payloads)

        return Rendezvous()


@pytest.mark.parametrize(
    ("ours", "theirs", "they_say"),
    [
        (View(cp_size=2), None, "cp_size 1"),
        (View(cp_size=2), View(cp_size=4, cp_rank=1), "cp_size 4"),
        (View(cp_size=2), View(cp_size=2, cp_rank=1, cut="rows"), "cut rows"),
    ],
)
def test_ranks_whose_parts_would_not_add_up_are_refused(ours, theirs, they_say):
    meeting, errors = Meeting(2), [None, None]

    def make(rank, view):
        try:
            Feed(
                iterator=batches() if rank == 0 else None,
                writer_rank=0,
                ranks=(0, 1),
                rank=rank,
                rendezvous=meeting.as_rank(rank),
                view=view,
            )
        except ConfigError as error:
            errors[rank] = str(error)

    other = threading.Thread(target=make, args=(1, theirs))
    other.start()
    make(0, ours)
    other.join()
    assert errors[0] == errors[1]
    assert "the ranks of a feed disagree on the views: rank 0 says cp_size 2, cut documents" in errors[0]
    assert they_say in errors[0].split("rank 1 says")[1]


def test_a_batch_that_cannot_be_cut_says_so_with_the_first_batch():
    feed = Feed(iterator=batches(), writer_rank=0, view=View(cp_size=5, cut="rows"))
    with feed, pytest.raises(ConfigError, match=r"multiple of 2 \* cp_size = 10, got 48"):
        next(feed)


def test_virtual_stages_take_every_batch_once_each():
    """The interleaved order: two micro batches through the first chunk, then the same two through the second."""
    stages = stages_of(0, 1, virtual_size=2)
    assert stages == ("first", "last")
    expected = list(batches(6))
    config = FeedConfig(hold=3)
    with Feed(iterator=batches(6), writer_rank=0, view=View(stage=stages), config=config) as feed:
        first, last = virtual_stages(feed, stages)
        for turn in range(3):
            for chunk, names in ((first, {"tokens", "position_ids"}), (last, {"labels", "loss_mask"})):
                for index in (2 * turn, 2 * turn + 1):
                    batch = next(chunk)
                    assert batch.index == index
                    assert set(batch) == names | {"cu_seqlens", "max_seqlen"}
                    for name in names:
                        assert np.array_equal(batch[name], expected[index][name])
        assert next(first, None) is None
        assert next(last, None) is None
        assert next(first, None) is None
