"""A rank that is interrupted while it imports torch ends without a word."""

from __future__ import annotations

import signal
import subprocess
import sys

INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "headrace.demo.worker":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from headrace.demo.rank import main
main()
"""


def test_an_interrupt_of_its_imports_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
