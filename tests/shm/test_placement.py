"""Where the writer goes, on machines of all kinds."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.shm import placement
from headrace.shm.placement import Cores, chosen, describe, parse_cpus, plan, read_cores

TWO_SOCKETS = Cores(allowed=frozenset(range(16)), nodes={0: frozenset(range(8)), 1: frozenset(range(8, 16))})
ONE_SOCKET = Cores(allowed=frozenset(range(4)), nodes={0: frozenset(range(4))})
ANYWHERE = frozenset(range(16))


def test_beside_the_ranks_devices_and_off_the_ranks_cores() -> None:
    ranks = (frozenset({8, 9}), frozenset({10, 11}))
    place = plan(TWO_SOCKETS, ranks=ranks, device_nodes=(1, 1))
    assert (place.cpus, place.node) == (frozenset({12, 13, 14, 15}), 1)
    assert (
        describe(place) == "cores 12-15, memory on node 1 (node 1 has the ranks' devices; off the ranks' 4 cores there)"
    )


def test_most_devices_decide() -> None:
    assert plan(TWO_SOCKETS, ranks=(), device_nodes=(0, 1, 1)).node == 1


def test_without_devices_the_ranks_home_decides() -> None:
    place = plan(TWO_SOCKETS, ranks=(frozenset({0, 1}), frozenset({2})))
    assert (place.cpus, place.node) == (frozenset({3, 4, 5, 6, 7}), 0)


def test_ranks_on_both_sockets_without_devices_leave_the_memory_to_the_kernel() -> None:
    place = plan(TWO_SOCKETS, ranks=(frozenset({0}), frozenset({8})))
    assert (place.cpus, place.node) == (ANYWHERE - {0, 8}, None)


def test_ranks_that_may_run_anywhere_are_pinned_nowhere() -> None:
    place = plan(TWO_SOCKETS, ranks=(ANYWHERE, ANYWHERE), device_nodes=(0,))
    assert (place.cpus, place.node) == (frozenset(range(8)), 0)


def test_when_ranks_hold_every_core_the_writer_shares() -> None:
    place = plan(ONE_SOCKET, ranks=tuple(frozenset({cpu}) for cpu in range(4)), device_nodes=(0, 0, 0, 0))
    assert (place.cpus, place.node) == (frozenset(range(4)), 0)
    assert "no core there is free of ranks" in place.why


def test_a_device_whose_node_is_forbidden_or_unknown_does_not_decide() -> None:
    only_node_0 = Cores(allowed=frozenset(range(8)), nodes=TWO_SOCKETS.nodes)
    assert plan(only_node_0, ranks=(), device_nodes=(1,)).cpus == frozenset(range(8))
    assert plan(TWO_SOCKETS, ranks=(), device_nodes=(7,)).node is None


cpu_sets = st.frozensets(st.integers(0, 15), max_size=16)


@given(
    allowed=st.frozensets(st.integers(0, 15), min_size=1),
    ranks=st.lists(cpu_sets, max_size=4),
    devices=st.lists(st.integers(0, 2)),
)
def test_there_is_always_a_place_and_it_is_allowed(
    allowed: frozenset[int], ranks: list[frozenset[int]], devices: list[int]
) -> None:
    place = plan(Cores(allowed=allowed, nodes=TWO_SOCKETS.nodes), ranks=tuple(ranks), device_nodes=tuple(devices))
    assert place.cpus
    assert place.cpus <= allowed


def test_the_user_decides_otherwise() -> None:
    place = chosen("8-9,12", TWO_SOCKETS)
    assert (place.cpus, place.node, place.why) == (frozenset({8, 9, 12}), 1, "as configured")
    assert chosen("7-8", TWO_SOCKETS).node is None
    with pytest.raises(ConfigError, match="none of the cores '40' may be used here: only 0-15 may"):
        chosen("40", TWO_SOCKETS)


@pytest.mark.parametrize("text", ["x", "3-1", "1-", "-1", "1;2"])
def test_what_is_no_list_of_cores_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="looks like 0-3,8"):
        parse_cpus(text)


@given(st.frozensets(st.integers(0, 300)))
def test_lists_of_cores_read_back(cpus: frozenset[int]) -> None:
    assert parse_cpus(placement._listed(cpus)) == cpus


def test_a_machine_is_read_from_sysfs(tmp_path: Path) -> None:
    for node, cpus in {0: "0-3", 1: "4-7\n", 2: ""}.items():
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    cores = read_cores(tmp_path)
    assert cores.nodes == {0: frozenset(range(4)), 1: frozenset(range(4, 8)), 2: frozenset()}
    assert cores.allowed == os.sched_getaffinity(0)
    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert placement.device_node("0000:3B:00.0", tmp_path) == 1
    (device / "numa_node").write_text("-1\n")
    assert placement.device_node("0000:3b:00.0", tmp_path) is None
    assert placement.device_node("0000:ff:00.0", tmp_path) is None


def test_ranks_that_cannot_be_asked_are_left_out() -> None:
    assert placement.rank_cpus([os.getpid(), 2**22 + 1]) == (frozenset(os.sched_getaffinity(0)),)


def test_a_process_settles_and_is_told_what_it_may_not() -> None:
    code = """
        import os
        from headrace.shm import placement
        cores = placement.read_cores()
        place = placement.plan(cores, ranks=(), device_nodes=(min(cores.nodes, default=0),))
        notes = placement.settle(place)
        assert os.sched_getaffinity(0) == place.cpus or notes
        gone = placement.Placement(cpus=frozenset({4095}), node=1000, why="nowhere")
        print(len(placement.settle(gone)))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "2", "")
