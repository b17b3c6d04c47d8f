"""`python -m headrace.adapters.megatron SCRIPT ARGS...`: the script as Python itself would run it, after install()."""

from __future__ import annotations

import os
import runpy
import sys

from headrace.adapters.megatron.installing import install

USAGE = "usage: python -m headrace.adapters.megatron SCRIPT ARGS... --enable-share-memory"


def main() -> None:
    """sys.argv and sys.path become what they are for `python SCRIPT ARGS...`."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(USAGE)
    script = arguments[0]
    if not os.path.isfile(script):
        sys.exit(f"{script} is no file\n{USAGE}")
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    install()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
