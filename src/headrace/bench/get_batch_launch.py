"""Runs the ranks of a case as one group of processes, and leaves none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from headrace.bench.get_batch_case import Case, CaseResult
from headrace.errors import FeedTimeout, HeadraceError

LAST_WORDS_BYTES = 2000


def launch(case: Case, *, timeout_s: float) -> CaseResult:
    """Blocks until all ranks have ended. HeadraceError with a failed rank's last words, FeedTimeout after `timeout_s`.

    The ranks form a process group of their own, with everything they start: stopped workers can only be reached by a
    signal to the group once their rank is dead.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    charge = msgspec.json.encode(case).decode()
    try:
        for rank in range(case.num_ranks):
            with (Path(case.folder) / f"rank{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "headrace.bench.get_batch_rank", charge, str(rank)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        process_group=ranks[0].pid if ranks else 0,
                    )
                )
        wait_for(ranks, case, timeout_s)
    finally:
        if ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ranks[0].pid, signal.SIGKILL)
        for process in ranks:
            process.wait()
    return msgspec.json.decode((Path(case.folder) / "result.json").read_bytes(), type=CaseResult)


def wait_for(ranks: list[subprocess.Popen[bytes]], case: Case, timeout_s: float) -> None:
    """Returns when all have ended well; the first that has not is an error at once."""
    deadline = time.monotonic() + timeout_s
    while True:
        # Without reaping them: the first rank's pid names the process group, and must stay taken until it is killed.
        ended = [os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for one in ranks]
        for rank, status in enumerate(ended):
            if status is not None and (status.si_code != os.CLD_EXITED or status.si_status != 0):
                raise HeadraceError(f"rank {rank} of the bench failed:\n{last_words(case, rank)}")
        if all(ended):
            return
        if time.monotonic() > deadline:
            raise FeedTimeout(f"the {case.num_ranks} ranks of a bench", timeout_s=timeout_s)
        time.sleep(0.02)


def last_words(case: Case, rank: int) -> str:
    """The end of what a rank wrote."""
    return (Path(case.folder) / f"rank{rank}.log").read_bytes()[-LAST_WORDS_BYTES:].decode(errors="replace").strip()
