"""`headrace demo` as a user starts it, with everything it may leave in folders of its own."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

MARK = "HEADRACE_TEST_RUN"
DEADLINE_S = 300.0


class LaunchedDemo:
    """A running demo. `finish()` ends the wait, whatever became of it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._mark = secrets.token_hex(8)
        self.temporary, self.cache, elsewhere = folder / "tmp", folder / "cache", folder / "elsewhere"
        for one in (self.temporary, self.cache, elsewhere):
            one.mkdir()
        # A module that shadows one of Python's own: the ranks must not take it from the current folder.
        (elsewhere / "select.py").write_text("raise ImportError('taken from the current folder')\n")
        self._seen: set[int] = set()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from headrace.cli import main; main()", "demo", *arguments],
            cwd=elsewhere,
            env={
                **os.environ,
                MARK: self._mark,
                "TMPDIR": str(self.temporary),
                "XDG_CACHE_HOME": str(self.cache),
                "COLUMNS": "300",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        try:
            out, error = self.process.communicate(timeout=DEADLINE_S)
        finally:
            self.process.kill()
        return self.process.returncode, out, error

    def processes(self) -> dict[int, str]:
        """Pid and name of everything that descends from the demo, itself included."""
        entry, found = f"{MARK}={self._mark}".encode(), {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    if entry in (folder / "environ").read_bytes().split(b"\0"):
                        found[int(folder.name)] = (folder / "comm").read_text().strip()
                except OSError:
                    pass
        self._seen |= found.keys()
        return found

    def wait_for_feeder(self) -> int:
        """Pid of the feeder once its ring is mapped by both ranks: nobody outside is told of that, so look for it."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.finish()
            alive = self.processes()
            feeders = [pid for pid, name in alive.items() if name == "headrace-feeder"]
            if feeders and sum(_maps_a_ring(pid) for pid in alive) >= 3:
                return feeders[0]
            time.sleep(0.05)
        raise AssertionError("no feeder came up")

    def leftovers(self) -> list[object]:
        """Processes, files, and names in /dev/shm (torch's hold the pid of their process) that are still there."""
        alive = self.processes()
        names = [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in self._seen)]
        return [*alive.items(), *self.temporary.iterdir(), *names]


def _maps_a_ring(pid: int) -> bool:
    try:
        return "memfd:headrace" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
