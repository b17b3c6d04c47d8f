"""Whose memory limit is in the way, from fake /proc and cgroup trees of real shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.shm.limits import check_headroom, headrooms

V2_MOUNT = "30 25 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNT = "33 25 0:29 {root} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"
GIB = 1 << 30


class Machine:
    """A fake root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/self/cgroup", "0::/\n")
        self.write("proc/self/mountinfo", V2_MOUNT.format(root="/"))
        self.memory(total_gib=64, available_gib=32)

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def memory(self, *, total_gib: int, available_gib: int, swap_gib: int = 0) -> None:
        kib = {"MemTotal": total_gib, "MemAvailable": available_gib, "SwapFree": swap_gib}
        self.write(
            "proc/meminfo", "".join(f"{key}: {gib << 20} kB\n" for key, gib in kib.items()) + "HugePages_Total: 0\n"
        )

    def group(self, path: str, limit: int | str, usage: int, *, version: int = 2, cache: int = 0) -> None:
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        top = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory"
        self.write(f"{top}{path}/{names[0]}", f"{limit}\n")
        self.write(f"{top}{path}/{names[1]}", f"{usage}\n")
        self.write(f"{top}{path}/memory.stat", f"anon 5\nactive_file {cache}\ninactive_file 0\nshmem 7\n")

    def refusal(self, nbytes: int) -> str:
        with pytest.raises(ConfigError) as caught:
            check_headroom(nbytes, knob="num_slots", root=self.root)
        return str(caught.value)

    def allows(self, nbytes: int) -> bool:
        check_headroom(nbytes, knob="num_slots", root=self.root)
        return True


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_cgroup_limit_the_machine_decides(machine: Machine) -> None:
    assert machine.allows(32 * GIB)
    text = machine.refusal(32 * GIB + 1)
    assert "34,359,738,369" in text, "need"
    assert "this machine's memory allows 34,359,738,368 more" in text, "have"
    assert "lower num_slots" in text, "knob"
    machine.memory(total_gib=64, available_gib=32, swap_gib=8)
    assert machine.allows(40 * GIB)


def test_version_2_own_group(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job/rank0\n")
    machine.group("/job/rank0", 8 * GIB, 7 * GIB)
    machine.group("/job", "max", 9 * GIB)
    assert machine.allows(GIB)
    assert "/job/rank0 allows 1,073,741,824 more (limit 8,589,934,592)" in machine.refusal(GIB + 1)


def test_version_2_an_ancestor_may_be_tighter(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/pods/pod1/container\n")
    machine.group("/pods/pod1/container", "max", GIB)
    machine.group("/pods/pod1", 4 * GIB, 3 * GIB)
    machine.group("/pods", 100 * GIB, 50 * GIB)
    assert "/pods/pod1 allows" in machine.refusal(2 * GIB)
    assert machine.allows(GIB)


def test_version_1_with_its_way_of_saying_no_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n")
    machine.write("proc/self/mountinfo", V1_MOUNT.format(root="/"))
    machine.group("/job", 9223372036854771712, 5 * GIB, version=1)
    assert machine.allows(20 * GIB)
    machine.group("/job", 6 * GIB, 5 * GIB, version=1)
    assert "memory/job allows" in machine.refusal(2 * GIB)


def test_page_cache_is_given_up_before_anything_is_killed(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.group("/job", 8 * GIB, 8 * GIB, cache=3 * GIB)
    assert machine.allows(3 * GIB)
    assert "/job allows" in machine.refusal(3 * GIB + 1)


def test_a_container_without_a_cgroup_namespace_sees_only_its_part_of_the_tree(machine: Machine) -> None:
    # /proc/self/cgroup names the host's path, while the mount shows the container's own group as its top.
    machine.write("proc/self/cgroup", "4:memory:/docker/abc\n")
    machine.write("proc/self/mountinfo", V1_MOUNT.format(root="/docker/abc"))
    machine.group("", 2 * GIB, GIB, version=1)
    assert "cgroup/memory allows 1,073,741,824 more" in machine.refusal(2 * GIB)


def test_a_name_that_only_begins_alike_is_another_group(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/docker/abcdef\n")
    machine.write("proc/self/mountinfo", V1_MOUNT.format(root="/docker/abc"))
    machine.group("def", 1, 1, version=1)
    assert machine.allows(GIB)


@pytest.mark.parametrize("missing", ["proc/self/cgroup", "proc/self/mountinfo", "proc/meminfo"])
def test_what_cannot_be_read_limits_nothing(machine: Machine, missing: str) -> None:
    (machine.root / missing).unlink()
    assert machine.allows(GIB)


def test_a_group_without_the_memory_controller_limits_nothing(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.write("sys/fs/cgroup/job/cgroup.procs", "1\n")
    assert [room.name for room in headrooms(machine.root)] == ["this machine's memory"]


def test_this_machine_can_be_read() -> None:
    assert [room.name for room in headrooms()][-1] == "this machine's memory"
    assert all(room.free_bytes >= 0 for room in headrooms())
