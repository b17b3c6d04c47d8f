"""Processes that write parts side by side.

Each is a fresh interpreter that parses the tokenizer once. It leaves when told to, and when its parent dies.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from headrace.errors import ConfigError
from headrace.store.bpe import Tokenizer
from headrace.store.prepare_part import Part, PartWriter


def write_parts(writer: PartWriter, parts: Sequence[Part], *, num_processes: int) -> Generator[Part, None, None]:
    """Write the parts, and name each when it is finished. Blocks; closing the iterator early stops the others.

    Raises what writing a part raises, and ConfigError if a process is killed.
    """
    if num_processes < 1:
        raise ConfigError(f"the number of processes must be at least 1, got {num_processes}")
    if num_processes == 1 or len(parts) < 2:
        tokenizer = writer.parsed()
        for part in parts:
            writer.write(part, tokenizer, stopped=_never)
            yield part
        return
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(
        min(num_processes, len(parts)), mp_context=context, initializer=_begin, initargs=(writer, stop)
    )
    try:
        # Processes are started here, and must not hear Ctrl-C before they ignore it either: they import for a while.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = [pool.submit(_write, part) for part in parts]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool as error:
        raise ConfigError(
            "a process that tokenised was killed, most likely for its memory; run it again with fewer processes: "
            "what is finished is kept"
        ) from error
    finally:
        stop.set()
        with suppress(BrokenProcessPool):
            pool.shutdown(cancel_futures=True)


# Of a worker process, set once by _begin.
_writer: PartWriter
_tokenizer: Tokenizer
_stop: Any


def _begin(writer: PartWriter, stop: Any) -> None:
    global _writer, _tokenizer, _stop
    # Ctrl-C reaches the whole terminal; the parent tells us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    # The processes are the parallelism: threads of the tokenizer beside them would only be in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _writer, _tokenizer, _stop = writer, writer.parsed(), stop


def _write(part: Part) -> Part:
    _writer.write(part, _tokenizer, stopped=_stop.is_set)
    return part


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _never() -> bool:
    return False
