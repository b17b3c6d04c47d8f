"""The folder of one run, gone when the run ends. Nothing of a process that is killed can remove it: the next run does.

Who still uses a folder is told by a lock on a file in it, which the kernel takes away with the process, however it
ends. A pid would mean nothing where containers share the folder for temporary files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "headrace-demo-"
LOCK_FILE = "in-use"


@contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder below the one for temporary files. First removes those of this user's runs that were killed."""
    for left in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        _remove_unless_used(left)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        # Locked before it has its name: a folder that shows no lock file yet is left alone.
        with (folder / f"{LOCK_FILE}.new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / LOCK_FILE)
            yield folder


def _remove_unless_used(folder: Path) -> None:
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        with (folder / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # in use (BlockingIOError), not finished, gone by now, or not a run's folder at all
        return
