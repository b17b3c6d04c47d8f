"""The command line: one file per verb, nothing heavy imported before a verb runs.

Every verb takes `--json FILE` for a versioned document. Exit codes: 0 good, 1 the work failed, 2 wrong use.
"""

from headrace.cli.app import main

__all__ = ["main"]
