"""The two ratios that are our own definition, and the published factors under one of them."""

import pytest

from headrace.errors import ConfigError
from headrace.measure.bandwidth import (
    NOMINAL_GB_PER_S,
    Transfer,
    bandwidth_ratios,
    bus_bandwidth,
    training_efficiency,
    training_efficiency_of_trace,
)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 1.75), ("reduce_scatter", 0.875), ("all_gather", 0.875), ("all_to_all", 0.875),
     ("broadcast", 1), ("reduce", 1), ("send_recv", 1)],
)  # fmt: skip
def test_bus_factors_for_eight_ranks(collective, factor):
    assert bus_bandwidth(collective, 1e9, 8, 0.5) == pytest.approx(2e9 * factor)


def test_no_time_or_nobody_to_talk_to_is_none_and_an_unknown_collective_is_refused():
    assert bus_bandwidth("all_reduce", 1e9, 8, 0.0) is None
    assert bus_bandwidth("all_reduce", 1e9, 1, 1.0) is None
    with pytest.raises(ConfigError, match="all_reduce"):
        bus_bandwidth("gossip", 1e9, 8, 1.0)


def test_a_ratio_is_a_sum_over_a_sum_per_transport():
    transfers = [
        Transfer(transport="HCCS", nbytes=18e9, seconds=1.0),
        Transfer(transport="HCCS", nbytes=0.0, seconds=1.0),
        Transfer(transport="RDMA", nbytes=10e9, seconds=1.0),
        Transfer(transport="NVLINK", nbytes=1e9, seconds=1.0),
        Transfer(transport="PCIE", nbytes=1e9, seconds=0.0),
    ]
    got = bandwidth_ratios(transfers, NOMINAL_GB_PER_S["910A"])
    assert got["HCCS"].ratio == pytest.approx(0.5)
    assert got["RDMA"].ratio == pytest.approx(0.8)
    assert got["NVLINK"].ratio is None
    assert "not known" in got["NVLINK"].reason
    assert got["PCIE"].achieved_gb_per_s is None
    assert all("our definition" in one.definition for one in got.values())


PHASES = {"forward": 20, "backward": 40, "optimizer": 10, "post": None, "communication": 20}


def test_training_efficiency_is_computing_over_the_step():
    got = training_efficiency(100, PHASES, num_devices=8)
    assert got.value == pytest.approx(0.7)
    assert "our definition" in got.definition
    assert training_efficiency_of_trace(70.0, 100.0).value == pytest.approx(0.7)


def test_unseen_communication_hides_in_computing_so_nothing_is_claimed():
    hidden = PHASES | {"communication": None}
    assert training_efficiency(100, hidden, num_devices=8).value is None
    assert "communication" in training_efficiency(100, hidden, num_devices=8).reason
    assert training_efficiency(100, hidden, num_devices=1).value == pytest.approx(0.7)


def test_no_step_no_efficiency():
    assert training_efficiency(None, PHASES, num_devices=1).value is None
    assert training_efficiency_of_trace(1.0, 0.0).value is None
