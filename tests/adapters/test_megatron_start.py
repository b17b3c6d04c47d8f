"""Were all ranks started alike? What they say to each other through the job's store, without a job."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from headrace.adapters.megatron import flags
from headrace.adapters.megatron.objections import LOOK_AGAIN_S, Objections
from headrace.errors import ConfigError, FeedTimeout


class Slow:
    """A job's store as the first rank has it, whose neighbour does what it does between two looks at the store."""

    def __init__(self, store, *, arrive):
        self._store, self._arrive = store, [None, arrive]

    def __getattr__(self, name):
        return getattr(self._store, name)

    def check(self, keys):
        if self._arrive and (arrive := self._arrive.pop(0)) is not None:
            arrive()
        return self._store.check(keys)


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_rank_may_come_late(tmp_path, monkeypatch, capfd, kind):
    shared = (
        dist.FileStore(str(tmp_path / "store"), 2)
        if kind == "file"
        else dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    )
    rank = [0]
    monkeypatch.setattr(dist, "get_rank", lambda: rank[0])
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def arrive():
        rank[0] = 1
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: shared)
        flags.agree("--enable-share-memory", timeout_s=60.0)

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: Slow(shared, arrive=arrive))
    flags.agree("--enable-share-memory", timeout_s=60.0)
    assert rank == [1], "it did not wait for the other one"
    assert capfd.readouterr().err == "", "no warnings while it waits"


def test_a_rank_that_never_comes_is_not_called_alive(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(FeedTimeout) as caught:
        flags.agree("--enable-share-memory", timeout_s=0.0)
    said = str(caught.value)
    assert "the last of 3 ranks to start through headrace.adapters.megatron (1 did)" in said
    assert "may have ended" in said
    assert "alive" not in said
    assert "--distributed-timeout-minutes" in said


def test_a_rank_that_dies_while_its_flags_are_refused_hides_nothing(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(flags, "_GOODBYE_S", 0.0)
    for key in ("arrived", "alike/another"):  # what the other one left
        store.add(f"headrace/megatron/flags/{key}", 1)
    store.set("headrace/megatron/flags/first", "none of the flags")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.raises(ConfigError, match="rank 0 has none of the flags; rank 1 --enable-share-memory"):
        flags.agree("--enable-share-memory", timeout_s=0.0)


def test_the_writing_rank_looks_for_objections_once_a_second_and_hears_each_once(monkeypatch):
    store, now_s = dist.HashStore(), [0.0]
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    reading, writing = (Objections((4, 6), clock=lambda: now_s[0]) for _ in range(2))
    assert writing.heard() is None
    reading.raise_one("rank 6 was given one too")
    reading.raise_one("and once more")
    assert writing.heard() is None, "it has just looked"
    now_s[0] += LOOK_AGAIN_S
    assert writing.heard() == "rank 6 was given one too"
    now_s[0] += LOOK_AGAIN_S
    assert writing.heard() is None
    assert Objections((0, 2)).heard() is None, "of another group"
