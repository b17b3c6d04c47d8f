"""Under which conditions a number was measured. A figure without them cannot be compared with another one.

Nothing is imported to learn a version: importing torch costs seconds and starts threads, and both would change what is
measured afterwards. Versions come from the installed packages' metadata.
"""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGE_DIRECTORY = Path(__file__).resolve().parent.parent

GIT_TIMEOUT_S = 5.0
"""A checkout on a slow network drive may not hold up a measurement; the commit is then unknown (None)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Facts of the machine and the software, plain values only: `dataclasses.asdict` of it is JSON.

    None means "could not be seen here", never zero.
    """

    cpu_model: str
    machine: str
    """Instruction set as the kernel names it: x86_64, aarch64."""
    num_cores: int
    """Logical processors that are online."""
    affinity: tuple[int, ...]
    """Logical processors this process may run on: the number that counts inside a container."""
    cpu_governor: str | None
    num_numa_nodes: int | None
    memory_bytes: int | None
    kernel: str
    python: str
    headrace: str | None
    numpy: str | None
    torch: str | None
    transformers: str | None
    load_average: tuple[float, float, float] | None
    """Runnable processes over the last 1, 5 and 15 minutes: above `len(affinity)` somebody else was measured too."""
    git_commit: str | None
    git_dirty: bool | None


def capture_environment(checkout: Path = PACKAGE_DIRECTORY) -> Environment:
    """Look around once; costs a few milliseconds (two `git` processes), so call it outside timed parts.

    `git_commit` and `git_dirty` describe the repository that tracks files in `checkout`, by default headrace itself;
    both are None when nothing there is tracked (a wheel in a virtual environment that lies inside somebody's
    repository is not a checkout of it). Never raises.
    """
    commit, dirty = git_state(checkout)
    return Environment(
        cpu_model=cpu_model(),
        machine=platform.machine(),
        num_cores=os.cpu_count() or 1,
        affinity=affinity(),
        cpu_governor=first_line(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        num_numa_nodes=num_numa_nodes(),
        memory_bytes=memory_bytes(),
        kernel=platform.release(),
        python=platform.python_version(),
        headrace=installed_version("headrace"),
        numpy=installed_version("numpy"),
        torch=installed_version("torch"),
        transformers=installed_version("transformers"),
        load_average=load_average(),
        git_commit=commit,
        git_dirty=dirty,
    )


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, from its metadata; None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name. arm64 kernels publish implementer and part numbers instead of a name."""
    found: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, colon, value = line.partition(":")
            if colon:
                found.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    if name := found.get("model name"):
        return name
    if part := found.get("CPU part"):
        return f"{platform.machine()} implementer {found.get('CPU implementer', '?')} part {part}"
    return platform.processor() or platform.machine()


def affinity() -> tuple[int, ...]:
    """Logical processors this process may use; all of them where the system has no affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def num_numa_nodes() -> int | None:
    """Memory nodes of the machine, None where the kernel does not list them."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None


def memory_bytes() -> int | None:
    """Physical memory of the machine in bytes (not the container's limit)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def load_average() -> tuple[float, float, float] | None:
    """The kernel's 1, 5 and 15 minute load averages."""
    try:
        return os.getloadavg()
    except OSError:
        return None


def git_state(directory: Path) -> tuple[str | None, bool | None]:
    """(commit, dirty) of the repository that tracks files in `directory`; (None, None) when none does."""
    if not git(directory, "ls-files", "--", "."):
        return None, None
    commit = git(directory, "rev-parse", "HEAD")
    changed = git(directory, "status", "--porcelain", "--untracked-files=no")
    return commit or None, None if changed is None else bool(changed)


def git(directory: Path, *arguments: str) -> str | None:
    """What one git command prints, or None when there is no git, no repository, or it takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def first_line(path: Path) -> str | None:
    """First line of a small kernel file, None where the kernel does not have it."""
    try:
        return path.read_text().split("\n", 1)[0].strip() or None
    except OSError:
        return None
