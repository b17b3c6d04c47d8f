"""Arguments of a wrong kind are refused by name, with what was needed and what was there. Without a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConfigError, SourceError
from headrace.feed import Alone, Feed, FeedConfig
from headrace.feed.packed_tokens import PackedTokens
from headrace.packing import View


def one_feed(**how: Any) -> Feed[np.ndarray]:
    return Feed(**({"iterator": iter([{"x": np.arange(2)}]), "writer_rank": 0} | how))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "slot_bytes": (lambda: FeedConfig(slot_bytes="1M"), "slot_bytes must be a whole number, got '1M' (str)"),  # type: ignore[arg-type]
    "max_slot_bytes": (lambda: FeedConfig(max_slot_bytes=1e9), "max_slot_bytes must be a whole number, got 10"),  # type: ignore[arg-type]
    "start_timeout_s": (lambda: FeedConfig(start_timeout_s=float("nan")), "start_timeout_s must be a positive number"),
    "feeder_cpus": (lambda: FeedConfig(feeder_cpus=3), "feeder_cpus must be text such as '0-3,8', got 3"),  # type: ignore[arg-type]
    "cp_size": (lambda: View(cp_size="2"), "cp_size must be a whole number, got '2'"),  # type: ignore[arg-type]
    "mtp_depth": (lambda: View(mtp_depth=None), "mtp_depth must be a whole number, got None"),  # type: ignore[arg-type]
    "seq_length": (lambda: PackedTokens("c", seq_length="4k").check(), "seq_length must be a whole number, got '4k'"),  # type: ignore[arg-type]
    "packed seed": (lambda: Feed(PackedTokens("c", seq_length=8, seed="1")), "seed must be a whole number, got '1'"),  # type: ignore[arg-type]
    "split_name": (lambda: Feed(PackedTokens("c", seq_length=8, split_name="dev")), "`split_name` must be one of"),
    "layout": (lambda: Feed(PackedTokens("c", seq_length=8, layout="torch")), "got 'torch'"),
    "eod": (lambda: Feed(PackedTokens("c", seq_length=8, eod_mask_loss=True)), "eod_mask_loss needs `eod`"),
    "data_rank": (lambda: one_feed(data_rank=1.5, data_size=2), "data_rank must be a whole number, got 1.5 (float)"),
    "data_size": (lambda: one_feed(data_size="1"), "data_size must be a whole number, got '1'"),
    "seed": (lambda: one_feed(seed=None), "seed must be a whole number, got None"),
    "writer_rank": (lambda: one_feed(writer_rank="0"), "writer_rank must be a whole number, got '0'"),
    "view": (lambda: one_feed(view=3), "view must be a View or None, got 3"),
    "config": (lambda: one_feed(config={"hold": 2}), "config must be a FeedConfig or None, got {'hold': 2}"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_a_wrong_kind_is_refused_by_name(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        call()
    assert message in str(caught.value)


def test_integers_of_numpy_are_integers() -> None:
    with one_feed(data_rank=np.int64(1), data_size=np.int32(2), config=FeedConfig(num_slots=np.int64(3))) as feed:
        assert next(feed)["x"].tolist() == [0, 1]
        assert type(feed.state_dict()["data_size"]) is int


class Listening(Alone):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told = b""

    def exchange(self, payload: bytes, *, timeout_s: float) -> list[bytes]:
        self.told = payload
        return [payload]


@dataclass
class Nameless:
    """A source that cannot say which data it reads."""

    def __call__(self, context: Any) -> Any:
        return iter([{"x": np.arange(2)}])

    def identity(self) -> str:
        return open("/no/such/corpus").read()


@dataclass(repr=False)
class Unspeakable(Nameless):
    def __repr__(self) -> str:
        raise OSError("the disk is on fire")


def test_what_a_sources_own_identity_raises_is_the_sources_error() -> None:
    with Feed(Nameless()) as feed:
        with pytest.raises(SourceError, match=r"the source's identity\(\) raised FileNotFoundError: .*no/such/corpus"):
            feed.state_dict()
        with pytest.raises(SourceError, match=r"the source's identity\(\) raised FileNotFoundError"):
            next(feed)


def test_the_others_are_told_of_a_source_that_cannot_be_described() -> None:
    rendezvous = Listening()
    with pytest.raises(SourceError, match="the source's repr raised OSError: the disk is on fire"):
        Feed(Unspeakable(), rendezvous=rendezvous)
    assert b"the disk is on fire" in rendezvous.told
