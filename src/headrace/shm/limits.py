"""How much memory may be reserved here, and by whose limit.

Reserving past a cgroup's limit does not return an error: the kernel kills a process. So the limits are read first, of
every ancestor (a pod's slice can be tighter than the container's own group), v1 and v2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError

ROOT = Path("/")
# v1 says "no limit" with a number near 2^63.
NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Headroom:
    """What one limit still allows, in bytes."""

    name: str
    limit_bytes: int
    free_bytes: int


def check_headroom(nbytes: int, *, knob: str, root: Path = ROOT) -> None:
    """ConfigError when `nbytes` of shared memory would pass a memory limit that applies to this process."""
    for room in headrooms(root):
        if nbytes > room.free_bytes:
            raise ConfigError(
                f"the ring needs {nbytes:,} bytes of shared memory, but {room.name} allows {room.free_bytes:,} more "
                f"(limit {room.limit_bytes:,}); lower {knob} or raise the limit"
            )


def headrooms(root: Path = ROOT) -> Iterator[Headroom]:
    """Every memory limit that applies to this process: cgroup ancestors, then the machine."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        memberships, mounts = [], []
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _ancestors(root, mounts, "cgroup2", "", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            yield from _ancestors(
                root, mounts, "cgroup", "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes"
            )
    yield from _machine(root)


def _ancestors(
    root: Path, mounts: list[str], kind: str, controller: str, path: str, limit_name: str, usage_name: str
) -> Iterator[Headroom]:
    for mounted_root, mount_point in _mounts_of(mounts, kind, controller):
        # Without a cgroup namespace a container sees the host's path, but only its own part of the tree is mounted.
        within = mounted_root != "/" and (path + "/").startswith(mounted_root + "/")
        inside = path[len(mounted_root) :] if within else path
        top = root / mount_point.lstrip("/")
        folder = top / inside.lstrip("/")
        for group in (folder, *folder.parents):
            limit, usage = _read_bytes(group / limit_name), _read_bytes(group / usage_name)
            if limit is not None and usage is not None and limit < NO_LIMIT_BYTES:
                free = max(0, limit - usage + _reclaimable(group))
                yield Headroom(name=f"cgroup {group}", limit_bytes=limit, free_bytes=free)
            if group == top:
                break


def _mounts_of(mounts: list[str], kind: str, controller: str) -> Iterator[tuple[str, str]]:
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, (filesystem, _source, options) = before.split(), after.split(" ", 2)
        if filesystem == kind and (not controller or controller in options.split(",")):
            yield fields[3], fields[4]


def _read_bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return NO_LIMIT_BYTES if text == "max" else int(text)


def _reclaimable(group: Path) -> int:
    """Page cache counts as used, but the kernel gives it up before it kills; shared memory is not in these lists."""
    try:
        pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        return sum(int(value) for key, value in pairs if key in ("active_file", "inactive_file"))
    except (OSError, ValueError):
        return 0


def _machine(root: Path) -> Iterator[Headroom]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    if "MemAvailable" in kib:
        yield Headroom(
            name="this machine's memory",
            limit_bytes=kib["MemTotal"] * 1024,
            free_bytes=(kib["MemAvailable"] + kib.get("SwapFree", 0)) * 1024,
        )
