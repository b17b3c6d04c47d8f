"""A reading process: `python -m headrace.traces.worker`, inputs in through stdin, what they say out through stdout."""

from __future__ import annotations

import os
import sys

from headrace.errors import HeadraceError
from headrace.traces.reading import Job, read_input, receive, send


def main() -> None:
    """Serve until stdin closes. Errors travel as answers."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints must not end up between the answers
    while True:
        try:
            job = receive(sys.stdin.buffer)
        except EOFError:
            return
        assert isinstance(job, Job)
        try:
            send(answers, read_input(job.entry, keep_spans=job.keep_spans))
        except HeadraceError as error:
            send(answers, error)


if __name__ == "__main__":
    main()
