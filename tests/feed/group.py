"""Ranks of one job, led by a test."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.feed.meeting import Meeting
from tests.shm.company import PATIENCE_S, Actor, Died, Raised

RANK = Path(__file__).with_name("rank.py")


class Rank(Actor):
    """An actor that knows whether it owes an answer."""

    num_owed = 1  # its first line says that it is up

    def begin_call(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().begin_call(name, *args, **kwargs)
        self.num_owed += 1

    def answer(self) -> Any:
        try:
            answer = super().answer()
        except Raised:
            self.num_owed -= 1
            raise
        self.num_owed -= 1
        return answer


class Group:
    """`group.all("take", 3)` calls on every rank at once; a list of results, or the first error."""

    def __init__(
        self, num_ranks: int, *, role: str = "plain", environments: list[dict[str, str]] | None = None
    ) -> None:
        self.meeting = Meeting()
        self.num_ranks = num_ranks
        given = environments or [{} for _ in range(num_ranks)]
        self.ranks = [Rank(role, script=RANK, environment=environment) for environment in given]

    def make(self, name: str = "feed", **how: Any) -> list[Any]:
        """A feed of the whole group; values in lists of the group's length are one per rank."""
        return [result_of(one) for one in self.try_make(name, **how)]

    def try_make(self, name: str = "feed", **how: Any) -> list[Any]:
        """The same; each rank's result, or its error."""
        for rank in range(self.num_ranks):
            self.begin_make(rank, name, **how)
        return self.answers()

    def begin_make(self, rank: int, name: str = "feed", **how: Any) -> None:
        own = {key: one[rank] if isinstance(one, PerRank) else one for key, one in how.items()}
        facts = {"address": self.meeting.address, "ranks": list(range(self.num_ranks)), "rank": rank}
        self.ranks[rank].begin_call("make", name, **(facts | own))

    def all(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [result_of(one) for one in self.try_all(name, *args, **kwargs)]

    def try_all(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        self.begin_all(name, *args, **kwargs)
        return self.answers()

    def begin_all(self, name: str, *args: Any, **kwargs: Any) -> None:
        for rank in self.ranks:
            rank.begin_call(name, *args, **kwargs)

    def answers(self) -> list[Any]:
        """Everybody's result, or error."""
        return [outcome(rank.answer) for rank in self.ranks]

    def is_in_step(self) -> bool:
        """Every rank lives and has answered every call: the next test may go on with this group."""
        return all(rank.pid and rank.num_owed == 0 and rank.process.poll() is None for rank in self.ranks)

    def disband(self) -> str:
        """End everybody; returns everything they wrote to stderr."""
        for rank in self.ranks:
            rank.process.kill()
        errors = "".join(rank.bury() for rank in self.ranks)
        self.meeting.close()
        return errors


class Standing:
    """A group that serves test after test, until one leaves it out of step: then the next gets a new one."""

    def __init__(self, make: Callable[[], Group]) -> None:
        self._make, self._group = make, make()

    def group(self) -> Group:
        if not self._group.is_in_step():
            self._group.disband()
            self._group = self._make()
        return self._group

    def disband(self) -> str:
        return self._group.disband()


class PerRank(list[Any]):
    """One value per rank."""


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (Raised, Died) as error:
        return error


def result_of(one: Any) -> Any:
    if isinstance(one, Exception):
        raise one
    return one


def feeders() -> dict[int, int]:
    """Every feeder process there is, by pid, and who started it."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # Its name in /proc/PID/comm comes later; a zombie has no command line.
                is_feeder = b"headrace.feed.process" in (folder / "cmdline").read_bytes()
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if is_feeder:
                found[int(folder.name)] = int(parent)
    return found


def feeders_of(group: Group) -> list[int]:
    pids = {rank.pid for rank in group.ranks}
    return [feeder for feeder, parent in feeders().items() if parent in pids]


def await_end(pid: int) -> None:
    """Return once the process has ended; it hangs if it does not."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], PATIENCE_S)[0], f"process {pid} goes on"
    finally:
        os.close(pidfd)
