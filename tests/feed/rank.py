"""A rank that does what a test tells it, one call at a time: `python rank.py plain|torch`.

Reads calls as JSON lines from stdin, answers each with one JSON line. The tests decide when; nothing here sleeps.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import logging
import os
import pickle
import random
import signal
import sys
import threading
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from headrace.feed import Feed, FeedConfig, SourceContext
from tests.feed.meeting import MeetingRendezvous
from tests.shm.actor import numbers as numbers_of


class Rank:
    """What a test can ask of a process that feeds its training loop."""

    def __init__(self) -> None:
        self.feeds: dict[str, Any] = {}
        self.held: dict[str, list[Any]] = {}
        self.num_made: dict[str, int] = {}
        self.log: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.log.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("headrace").addHandler(handler)
        logging.getLogger("headrace").setLevel(logging.INFO)

    # -- making a feed -------------------------------------------------------------------------------------------------

    def make(
        self,
        name: str = "feed",
        *,
        writer: str = "feeder",
        source: str = "numbers",
        params: dict[str, Any] | None = None,
        module: str = "tests.feed.sources",
        **how: Any,
    ) -> None:
        """`source` of `module`, called with `params`, for a "feeder" or for the "iterator" that one rank has then.

        See _group for `how`.
        """
        chosen = partial(getattr(import_module(module), source), **(params or {}))
        group, index, data = self._group(how)
        if writer == "feeder":
            how["source"] = chosen
        else:
            writer_rank = how.setdefault("writer_rank", 0)
            context = SourceContext(seed=how.get("seed", 1234), **data)
            how["iterator"] = chosen(context) if index == writer_rank else None
        self.feeds[name] = self._feed(group, how)

    def debug(self, on: bool) -> None:
        os.environ["HEADRACE_DEBUG"] = str(int(on))

    def _group(self, how: dict[str, Any]) -> tuple[dict[str, Any], int, dict[str, int]]:
        """What the feed is told of its group, this rank's index in it, and its data_rank and data_size.

        `address`: the meeting's; `ranks`, `rank`: who takes part.
        """
        address, ranks, rank = how.pop("address"), tuple(how.pop("ranks")), how.pop("rank")
        data = {key: how.pop(key, default) for key, default in (("data_rank", 0), ("data_size", 1))}
        number = self.num_made[str(ranks)] = self.num_made.get(str(ranks), -1) + 1
        index = ranks.index(rank)
        rendezvous = MeetingRendezvous(address, str(ranks), index, len(ranks), number)
        return {"rendezvous": rendezvous, "ranks": ranks, "rank": rank, **data}, index, data

    def _feed(self, group: dict[str, Any], how: dict[str, Any]) -> Any:
        own = ("source", "iterator", "writer_rank", "seed")
        arguments = {key: how.pop(key) for key in own if key in how}
        return Feed(**arguments, **group, config=FeedConfig(**how))

    # -- batches -------------------------------------------------------------------------------------------------------

    def take(self, count: int = 1, name: str = "feed", hold: bool = False) -> list[Any]:
        """What `count` batches hold; "END" instead of a batch at the end."""
        taken = []
        for _ in range(count):
            try:
                batch = next(self.feeds[name])
            except StopIteration:
                taken.append("END")
                continue
            taken.append(described(batch))
            if hold:
                self.held.setdefault(name, []).append(batch)
        return taken

    def take_held(self, name: str = "feed") -> list[Any]:
        """What the held batches hold now: their content, or the error that reading them raises."""
        contents: list[Any] = []
        for batch in self.held[name]:
            try:
                contents.append(described(batch))
            except Exception as error:
                contents.append(type(error).__name__)
        return contents

    def drop_held(self) -> None:
        self.held.clear()

    def take_all(self, name: str = "feed") -> list[Any]:
        return [described(batch) for batch in self.feeds[name]]

    def take_until_it_raises(self, name: str = "feed") -> int:
        """How many batches came before."""
        for count in range(10**6):
            try:
                next(self.feeds[name])
            except Exception:
                return count
        return -1

    def names(self, name: str = "feed") -> dict[str, Any]:
        """What `model(**batch)` gets that is no array, and what a batch knows."""
        batch = next(self.feeds[name])
        return {
            "ints": {key: value for key, value in batch.items() if isinstance(value, int)},
            "max_seqlen": batch.max_seqlen,
            "num_documents": batch.num_documents,
            "consumed_samples": batch.consumed_samples,
            "len": len(batch),
        }

    def write_into_batch(self, name: str = "feed") -> None:
        batch = next(self.feeds[name])
        for key in batch:
            batch[key][...] = 0

    # -- state and facts -----------------------------------------------------------------------------------------------

    def state(self, name: str = "feed") -> str:
        return base64.b64encode(pickle.dumps(self.feeds[name].state_dict())).decode()

    def load(self, state: str, name: str = "feed") -> None:
        self.feeds[name].load_state_dict(pickle.loads(base64.b64decode(state)))

    def stats(self, name: str = "feed") -> dict[str, Any]:
        stats = self.feeds[name].stats()
        return {key: getattr(stats, key) for key in (*stats.__slots__, "ring_bytes")}

    def messages(self) -> list[str]:
        return self.log

    def pid(self) -> int:
        return os.getpid()

    def random_state(self) -> list[str]:
        random_states: tuple[Any, ...] = (random.getstate(), np.random.get_state())
        return [repr(state) for state in random_states]

    def census(self) -> dict[str, int]:
        """What a closed feed must not leave: descriptors and segments."""
        if "memfd:headrace" in Path("/proc/self/maps").read_text():
            gc.collect()  # what an error's traceback refers to; with torch, a tenth of a second
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "segments": Path("/proc/self/maps").read_text().count("memfd:headrace"),
        }

    # -- ends ----------------------------------------------------------------------------------------------------------

    def close(self, name: str = "feed") -> None:
        self.feeds.pop(name).close()
        self.held.clear()

    def close_but_keep(self, name: str = "feed") -> None:
        self.feeds[name].close()

    def drop(self, name: str = "feed") -> None:
        """Forget it without closing."""
        del self.feeds[name]

    def fail_inside(self, name: str = "feed") -> None:
        """A user's exception with a batch in hand."""
        with self.feeds.pop(name) as feed:
            batch = next(feed)
            raise ZeroDivisionError(f"the user's own, in batch {batch.index}")

    def take_while_closing(self, name: str = "feed") -> str:
        """Wait for a batch in a thread, close from this one; what does the waiting thread get?"""
        feed, caught = self.feeds.pop(name), []
        waits = threading.Event()

        def wait() -> None:
            waits.set()
            try:
                while True:
                    next(feed)
            except BaseException as error:
                caught.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=wait)
        thread.start()
        waits.wait()
        feed.close()
        thread.join()
        return caught[0]

    def take_in_threads(self, gate: str, name: str = "feed") -> dict[str, Any]:
        """One thread waits for a batch, until the file `gate` exists; two more try meanwhile."""
        feed, outcomes = self.feeds[name], []

        def take() -> None:
            try:
                outcomes.append(next(feed).index)
            except BaseException as error:
                outcomes.append(f"{type(error).__name__}: {error}")

        first = threading.Thread(target=take)
        first.start()
        while not feed._own_work.locked() and not outcomes:
            os.sched_yield()
        refused = []
        for _ in range(2):
            late = threading.Thread(target=take)
            late.start()
            late.join()
            refused.append(outcomes.pop())
        Path(gate).touch()
        first.join()
        return {"first": outcomes, "refused": refused}

    def fork_and_use(self, name: str = "feed") -> list[str]:
        """What a forked child gets that reads and closes the feed, and exits."""
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            answers = []
            for action in (lambda: next(self.feeds[name]), self.feeds[name].close):
                try:
                    action()
                    answers.append("nothing")
                except Exception as error:
                    answers.append(f"{type(error).__name__}: {error}")
            os.write(tell, json.dumps(answers).encode())
            sys.stdout.close()
            os._exit(0)
        os.close(tell)
        os.waitpid(child, 0)
        with open(told) as file:
            answers = json.load(file)
        return list(answers)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def limit_descriptors(self, spare: int) -> None:
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        used = max(int(fd) for fd in os.listdir("/proc/self/fd"))  # the last one is the listing's own
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, most))


def described(batch: Any) -> dict[str, Any]:
    """A batch as JSON."""
    arrays = {key: np.asarray(value) for key, value in batch.items() if not isinstance(value, int)}
    return {
        "index": batch.index,
        "fields": {key: [array.dtype.str, list(array.shape), values(array)] for key, array in arrays.items()},
        "extra": plain(batch.extra),
        "samples": list(batch.samples),
    }


def values(array: np.ndarray) -> Any:
    """The values of a small array; of a large one, which they are."""
    if array.size > 1000:
        return [repr(value) for value in np.unique(array).tolist()]
    return [repr(value) for value in array.ravel().tolist()]


def plain(extra: Any) -> Any:
    return json.loads(json.dumps(extra, default=repr)) if len(repr(extra)) < 10_000 else len(repr(extra))


def main() -> None:
    if sys.argv[1] == "torch":
        from tests.torch.feed.torch_rank import TorchRank

        rank: Rank = TorchRank()
    else:
        rank = Rank()
    print(json.dumps({"result": os.getpid()}), flush=True)
    while line := sys.stdin.readline():
        call = json.loads(line)
        try:
            answer = {"result": getattr(rank, call["call"])(*call["args"], **call["kwargs"])}
        except BaseException as error:
            answer = {"error": type(error).__name__, "text": str(error), "numbers": numbers_of(error)}
            if getattr(error, "source_traceback", ""):
                answer["numbers"]["source_traceback"] = error.source_traceback
            del error
        with contextlib.suppress(KeyboardInterrupt):
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
