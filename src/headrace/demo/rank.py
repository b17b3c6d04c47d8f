"""A rank of the demo: `python -m headrace.demo.rank FOLDER`, started by launch.py.

Nothing heavy is imported before an interrupt may end the process: importing torch takes seconds, and whoever pressed
Ctrl-C meanwhile wants no traceback of it from every rank.
"""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Import what a rank needs and be one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from headrace.demo import worker

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
