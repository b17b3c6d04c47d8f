"""A feed on another device: the next batch travels while this one is used, and nothing else changes for the user."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import FeedClosed, SourceError
from headrace.torch import Feed
from headrace.torch import feed as feed_module

from .counting import Counting, packed
from .fake_device import FakeDevice


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(feed_module, "Accelerator", lambda _device: fake)
    return fake


def test_every_batch_arrives_and_no_step_makes_the_host_wait(device: FakeDevice) -> None:
    seen: list[int] = []
    with Feed(Counting(20), device="cuda") as feed:
        for batch in feed:
            tensors = dict(batch)
            device.compute(
                lambda tensors=tensors: seen.append(int(tensors["tokens"].sum()) // tensors["tokens"].numel())
            )
            device.run_all()  # the device keeps up with the host
    assert seen == list(range(20))
    assert device.host_waits <= 1, "only when the ring has grown, for the copy from memory that is given back"
    assert not device.pinned, "undone at the end"


def test_a_host_that_runs_ahead_waits_for_slots_not_for_computation(device: FakeDevice) -> None:
    seen: list[int] = []
    with Feed(Counting(20), device="cuda") as feed:
        for batch in feed:
            tensors = dict(batch)
            device.compute(lambda tensors=tensors: seen.append(int(tensors["tokens"][0, 0])))
    device.run_all()
    assert seen == list(range(20))


def test_the_state_is_that_of_the_batch_in_hand_not_of_the_one_on_its_way(device: FakeDevice) -> None:
    with Feed(Counting(6), device="cuda") as feed:
        for number, _batch in enumerate(feed, start=1):
            assert feed.state_dict()["consumed_batches"] == number
            device.run_all()
        assert feed.state_dict()["consumed_batches"] == 6
        state = feed.state_dict()
    with Feed(Counting(6), device="cuda") as feed:
        feed.load_state_dict({**state, "consumed_batches": 4, "consumed_samples": 8})
        batch = next(feed)
        device.run_all()
        assert batch["tokens"][0, 0] == 4


def test_batches_are_valid_as_long_as_hold_says(device: FakeDevice) -> None:
    with Feed(Counting(8), device="cuda", hold=2) as feed:
        first, second, third = next(feed), next(feed), next(feed)
        device.run_all()
        assert (second["tokens"][0, 0], third["tokens"][0, 0]) == (1, 2)
        fourth = next(feed)
        device.run_all()
        assert (third["tokens"][0, 0], fourth["tokens"][0, 0]) == (2, 3)
        with pytest.raises(FeedClosed, match="no longer valid"):
            first["tokens"]


def test_the_source_s_error_comes_after_the_last_good_batch(device: FakeDevice) -> None:
    with Feed(Counting(8, fails_at=3), device="cuda") as feed:
        good = [next(feed), next(feed), next(feed)]
        with pytest.raises(SourceError, match="on fire"):
            next(feed)
        device.run_all()
        assert good[-1]["tokens"][0, 0] == 2


def test_owned_batches_are_for_keeps(device: FakeDevice) -> None:
    with Feed(Counting(5), device="cpu", owned=True) as feed:
        batches = list(feed)
    assert [int(batch["tokens"][0, 0]) for batch in batches] == list(range(5))
    assert all(isinstance(batch["weights"], torch.Tensor) for batch in batches)


def test_boundaries_stay_on_the_host(device: FakeDevice) -> None:
    with Feed(packed, device="cuda") as feed:
        batch = next(feed)
        assert batch["cu_seqlens"].sum() == 0, "nothing has run on the device yet"
        assert (batch.actual_seq_len, batch.max_seqlen, batch.num_documents) == ((8, 16), 8, 2)
        device.run_all()
        batch = next(feed)
        device.run_all()
        assert (batch.actual_seq_len, batch.max_seqlen, batch.num_documents) == ((3, 5, 16), 11, 3)
        assert batch["cu_seqlens"].tolist() == [0, 3, 5, 16]
        assert device.host_waits == 0
