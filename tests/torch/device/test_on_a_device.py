"""On a real accelerator: the same batches, and not one synchronisation of the host with it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headrace.torch import Feed

from .counting import Counting

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the same is shown under a fake one"),
]


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_batches_arrive_and_the_loop_never_synchronises(no_synchronisation: None) -> None:
    with Feed(Counting(40), device="cuda") as feed:
        means = [batch["tokens"].double().mean() for batch in feed]
    torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(means).tolist() == list(range(40))


def test_the_ring_is_pinned_and_pinned_again_after_it_has_grown() -> None:
    with Feed(Counting(40), device="cuda") as feed:
        first = next(feed)
        copies = feed._device_copies
        assert copies is not None
        assert copies.pinning is not None
        assert copies.pinning.is_pinned, copies.pinning.note
        assert first["tokens"].device.type == "cuda"
        for _batch in feed:
            pass
        assert copies.pinning is not None
        assert copies.pinning.is_pinned, copies.pinning.note
    # Nothing sticky is left for the user's next call.
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_values_are_those_of_the_host() -> None:
    with Feed(Counting(10), device="cuda") as on_device, Feed(Counting(10), owned=True) as on_host:
        for there, here in zip(on_device, on_host, strict=True):
            for name in here:
                np.testing.assert_array_equal(there[name].cpu().numpy(), here[name].numpy())
