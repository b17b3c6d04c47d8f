"""Reads many ranks at once, each in its own process, and says when each is done.

The workers are fresh interpreters that read paths from a pipe, not children of `multiprocessing`: a user's script
without a main guard must not run again, and nothing depends on what the calling process has loaded or locked.
"""

from __future__ import annotations

import csv
import os
import pickle
import queue
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from headrace.errors import FormatError, HeadraceError
from headrace.traces.ascend_cluster import read_cluster_output
from headrace.traces.ascend_db import read_ascend_db
from headrace.traces.ascend_text import read_ascend_text
from headrace.traces.discover import Input
from headrace.traces.kineto import read_kineto
from headrace.traces.op_table import read_op_table
from headrace.traces.records import read_records
from headrace.traces.timeline import RankTrace

Progress: TypeAlias = Callable[[Input, int, int], None]
"""Called after each input with (input, how many are done, how many there are), from the calling thread."""

IN_PROCESS_BELOW_BYTES = 24 << 20
"""Starting an interpreter costs what reading 100 MB does; below this much in all it is not worth it."""

UNFORESEEN = (
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    EOFError,
    csv.Error,
    zlib.error,
)
"""What a reader runs into where a file does not hold what files of its kind hold."""

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What travels to a worker."""

    entry: Input
    keep_spans: bool


def read_input(entry: Input, *, keep_spans: bool) -> tuple[RankTrace, ...]:
    """Read one input in this process. Raises FormatError, also for what a reader did not foresee in the file."""
    try:
        return _read(entry, keep_spans)
    except HeadraceError:
        raise
    except UNFORESEEN as error:
        raise FormatError(
            f"{entry.path} is not what {entry.kind} files are: {type(error).__name__}: {error}"
        ) from error


def _read(entry: Input, keep_spans: bool) -> tuple[RankTrace, ...]:
    if entry.kind == "kineto":
        return (read_kineto(entry.path, keep_spans=keep_spans),)
    if entry.kind == "ascend_text":
        return (read_ascend_text(entry.path, keep_spans=keep_spans),)
    if entry.kind == "ascend_db":
        return (read_ascend_db(entry.path, keep_spans=keep_spans),)
    if entry.kind == "cluster":
        return read_cluster_output(entry.path)
    if entry.kind == "op_table":
        return read_op_table(entry.path)
    return (read_records(entry.path),)


def read_inputs(
    entries: Sequence[Input], *, keep_spans: bool = False, workers: int | None = None, progress: Progress | None = None
) -> tuple[RankTrace, ...]:
    """Read all inputs, largest first, in up to `workers` processes (default: the cores this process may use).

    Raises what the first failing input raised; a worker that died names its input.
    """
    workers = min(workers or len(os.sched_getaffinity(0)), len(entries))
    done: dict[Path, tuple[RankTrace, ...]] = {}
    if workers < 2 or sum(entry.num_bytes for entry in entries) < IN_PROCESS_BELOW_BYTES:
        for entry in entries:
            done[entry.path] = read_input(entry, keep_spans=keep_spans)
            _tell(progress, entry, len(done), len(entries))
    else:
        _read_in_workers(entries, keep_spans, workers, progress, done)
    return tuple(trace for entry in entries for trace in done[entry.path])


def _tell(progress: Progress | None, entry: Input, count: int, total: int) -> None:
    if progress is not None:
        progress(entry, count, total)


def _read_in_workers(
    entries: Sequence[Input],
    keep_spans: bool,
    workers: int,
    progress: Progress | None,
    done: dict[Path, tuple[RankTrace, ...]],
) -> None:
    waiting: queue.SimpleQueue[Input | None] = queue.SimpleQueue()
    for entry in sorted(entries, key=lambda one: -one.num_bytes):
        waiting.put(entry)
    answers: queue.SimpleQueue[tuple[Input, tuple[RankTrace, ...] | BaseException]] = queue.SimpleQueue()
    processes = [_start_worker() for _ in range(workers)]
    threads = [
        threading.Thread(target=_feed, args=(one, waiting, answers, keep_spans), daemon=True) for one in processes
    ]
    for _ in threads:
        waiting.put(None)
    try:
        for thread in threads:
            thread.start()
        for _ in entries:
            entry, answer = answers.get()
            if isinstance(answer, BaseException):
                raise answer
            done[entry.path] = answer
            _tell(progress, entry, len(done), len(entries))
    finally:
        for process in processes:
            process.kill()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        for process in processes:
            process.communicate()


def _start_worker() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headrace.traces.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _feed(
    process: subprocess.Popen[bytes],
    waiting: queue.SimpleQueue[Input | None],
    answers: queue.SimpleQueue[tuple[Input, tuple[RankTrace, ...] | BaseException]],
    keep_spans: bool,
) -> None:
    """One thread per worker: hand it inputs until there are none."""
    assert process.stdin is not None
    assert process.stdout is not None
    while (entry := waiting.get()) is not None:
        try:
            send(process.stdin, Job(entry=entry, keep_spans=keep_spans))
            answer = receive(process.stdout)
        except (OSError, EOFError, ValueError):
            code = process.wait()
            answer = HeadraceError(f"the process that read {entry.path} died (exit status {code}); was memory short?")
        if not isinstance(answer, (tuple, BaseException)):
            answer = FormatError(f"{entry.path}: the reader answered {type(answer).__name__}")
        answers.put((entry, answer))
        if process.poll() is not None:
            return


def send(stream: IO[bytes], message: object) -> None:
    """Length and pickle. Both ends are this package in one user's processes: nothing foreign is unpickled."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> object:
    """The next message. Raises EOFError when the other end is gone."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError("the other process is gone")
    (size,) = LENGTH.unpack(head)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the other process is gone")
    return pickle.loads(data)
