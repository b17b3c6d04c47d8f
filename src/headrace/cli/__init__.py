"""The command line: one file per verb, nothing heavy imported before a verb runs.

Every verb takes `--json FILE` for a versioned document. Exit codes: 0 good, 1 the work failed, 2 wrong use, 130 Ctrl-C.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the `headrace` command. Imports are part of what Ctrl-C may end without a traceback."""
    try:
        from headrace.cli import app

        app.main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
