"""Numbers that no counter and no float can hold are refused by name, before anything is opened or as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import PackedTokens
from headrace.errors import ConfigError
from headrace.order import ElasticBlend, OrderRules, blend_megatron, split_range
from headrace.store import StoreWriter


@pytest.mark.parametrize("name", ["num_samples", "num_epochs", "micro_batch_size"])
def test_a_count_beyond_63_bits_is_refused(name: str) -> None:
    settings: dict[str, Any] = {"seq_length": 8, name: 2**63}
    with pytest.raises(ConfigError, match=rf"{name} must be below 2\*\*63, got a number of 64 bits"):
        PackedTokens("none", **settings).check()


@pytest.mark.parametrize(
    "settings", [{}, {"order": "elastic"}, {"documents": "whole"}], ids=["megatron", "elastic", "whole"]
)
def test_epochs_of_more_samples_than_can_be_counted_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with StoreWriter(tmp_path / "x", "uint16") as writer:
        writer.add_document(np.arange(1, 65, dtype=np.uint16))
    source = PackedTokens(str(tmp_path / "x"), seq_length=8, num_epochs=2**63 - 1, **settings)
    with pytest.raises(ConfigError, match="more samples than can be counted"):
        source.open_batches()


@pytest.mark.parametrize(("weights", "message"), [
    ((1e308, 1e308), r"must be above 0 and of a finite sum, got \[1e\+308, 1e\+308\]"),
    ((1, 10**400), "the weight of 'b' must be a number above 0, got inf"),
])  # fmt: skip
def test_weights_beyond_a_float_are_refused(weights: tuple[Any, Any], message: str) -> None:
    source = PackedTokens([(weights[0], "a"), (weights[1], "b")], seq_length=8, num_samples=5)
    with pytest.raises(ConfigError, match=message):
        source.check()


@pytest.mark.parametrize("weights", [[1e308, 1e308], [1, 10**400], [float("inf"), 1.0], [1.0, float("nan")]])
def test_orders_refuse_them_too(weights: list[float]) -> None:
    lengths = np.array([50], np.int32)
    with pytest.raises(ConfigError, match="of a finite sum"):
        blend_megatron([lengths, lengths], OrderRules(sequence_length=4, num_samples=3), weights=weights)
    order: Any = None
    with pytest.raises(ConfigError, match="of a finite sum"):
        ElasticBlend([order, order], weights, num_samples=3)


def test_a_split_of_an_infinite_sum_is_refused() -> None:
    with pytest.raises(ConfigError, match="not all 0 and of a finite sum"):
        split_range(10, "1e308,1e308", "train")
