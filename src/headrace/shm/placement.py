"""Where the writer should run and where the ring's memory should lie: near the ranks' devices, off the ranks' cores.

A batch that lies on the other socket crosses the link between them once for the writer and once for every device copy;
a writer on a rank's core delays that rank. Everything here is a wish: what the machine or a container forbids is a
note, never an error.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError

ROOT = Path("/")
_MPOL_PREFERRED = 1  # set_mempolicy(2): another node's memory when this one is full, rather than a kill
_MAX_NODES = 1024
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cores:
    """The machine as this process may use it."""

    allowed: frozenset[int]
    """Logical processors that the process may run on."""
    nodes: dict[int, frozenset[int]]
    """NUMA node to its processors; empty where the kernel does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where the writer goes. `cpus` is never empty; `node` None leaves the memory to the kernel."""

    cpus: frozenset[int]
    node: int | None
    why: str


def parse_cpus(text: str) -> frozenset[int]:
    """The kernel's list format, such as "0-3,8". ConfigError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (1, 0)
        if last < first:
            raise ConfigError(f"a list of cores looks like 0-3,8, got {text.strip()!r}")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def read_cores(root: Path = ROOT) -> Cores:
    """The cores and nodes of this machine that this process may use."""
    nodes = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        try:
            nodes[int(folder.name.removeprefix("node"))] = parse_cpus((folder / "cpulist").read_text())
        except (OSError, ConfigError):
            continue
    return Cores(allowed=frozenset(os.sched_getaffinity(0)), nodes=nodes)


def device_node(pci_address: str, root: Path = ROOT) -> int | None:
    """The NUMA node of a device such as "0000:3b:00.0"; None where it has none or is not to be found."""
    try:
        node = int((root / "sys/bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def rank_cpus(pids: Iterable[int]) -> tuple[frozenset[int], ...]:
    """Where each rank may run; ranks that cannot be asked (ended, another namespace) are left out."""
    found = []
    for pid in pids:
        try:
            found.append(frozenset(os.sched_getaffinity(pid)))
        except OSError:
            continue
    return tuple(found)


def plan(cores: Cores, *, ranks: tuple[frozenset[int], ...], device_nodes: tuple[int, ...] = ()) -> Placement:
    """Choose. The node: where most of the ranks' devices are, else the one that all ranks are confined to.

    The cores: those of that node, without the ones that ranks are pinned to, as long as any are left. A rank that may
    run on every core is pinned to none.
    """
    node = _node_of_devices(cores, device_nodes)
    reason = f"node {node} has the ranks' devices"
    if node is None:
        node = _node_of_ranks(cores, ranks)
        reason = f"node {node} has the ranks"
    near = cores.nodes.get(node, frozenset()) & cores.allowed if node is not None else frozenset()
    if not near:
        node, near, reason = None, cores.allowed, "no NUMA node is nearer than another"
    pinned = frozenset().union(*(cpus for cpus in ranks if not cpus >= cores.allowed))
    free = near - pinned
    if free:
        return Placement(cpus=free, node=node, why=f"{reason}; off the ranks' {len(near & pinned)} cores there")
    return Placement(cpus=near, node=node, why=f"{reason}; no core there is free of ranks")


def _node_of_devices(cores: Cores, device_nodes: tuple[int, ...]) -> int | None:
    known = Counter(node for node in device_nodes if node in cores.nodes)
    return known.most_common(1)[0][0] if known else None


def _node_of_ranks(cores: Cores, ranks: tuple[frozenset[int], ...]) -> int | None:
    if len(cores.nodes) < 2 or not ranks:
        return None
    everywhere = frozenset().union(*ranks)
    homes = [node for node, cpus in cores.nodes.items() if everywhere <= cpus]
    return homes[0] if homes else None


def chosen(text: str, cores: Cores) -> Placement:
    """What the user asked for, such as "0-3,8". ConfigError when none of it may be used."""
    cpus = parse_cpus(text) & cores.allowed
    if not cpus:
        raise ConfigError(f"none of the cores {text!r} may be used here: only {_listed(cores.allowed)} may")
    homes = [node for node, of_node in cores.nodes.items() if cpus <= of_node]
    return Placement(cpus=cpus, node=homes[0] if homes else None, why="as configured")


def settle(placement: Placement) -> list[str]:
    """Move this process there, and have the memory that it reserves from now on come from there.

    Call it before the ring is made. Returns what was not allowed, one sentence each.
    """
    notes = []
    try:
        os.sched_setaffinity(0, placement.cpus)
    except OSError as error:
        notes.append(f"cannot move to cores {_listed(placement.cpus)}: {error.strerror}")
    if placement.node is not None:
        code = _prefer_memory_of(placement.node)
        if code:
            notes.append(f"cannot bind memory to NUMA node {placement.node}: {os.strerror(code)}")
    return notes


def _prefer_memory_of(node: int) -> int:
    """0, or the errno: containers often forbid it, and kernels without NUMA do not know it."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or node >= _MAX_NODES:
        return errno.ENOSYS
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(number, _MPOL_PREFERRED, mask, ctypes.c_ulong(_MAX_NODES))
    return ctypes.get_errno() if failed else 0


def _listed(cpus: Iterable[int]) -> str:
    """The kernel's list format."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in parts)


def describe(placement: Placement) -> str:
    """For a log line and for stats: cores, node, and why."""
    memory = "memory where the kernel likes" if placement.node is None else f"memory on node {placement.node}"
    return f"cores {_listed(placement.cpus)}, {memory} ({placement.why})"
