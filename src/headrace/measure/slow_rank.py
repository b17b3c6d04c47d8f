"""Which rank do the others wait for? Live, once per window, from sums every rank has anyway.

Step times say nothing: synchronous ranks all take as long as the slowest. But who is late waits least. So the rank with
the least exposed communication in a window is the one the others waited for, if that is much and if it stays so:

    size         median wait of the others - its own wait, as a share of the step; below 3 % a window accuses nobody
    persistence  the share of the windows so far that accuse it; below 70 % nobody is named

Ranks are compared inside a group that does the same work (one pipeline stage): stages differ by design.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from headrace.errors import ConfigError
from headrace.measure.phases import COMPUTING

MIN_SHARE = 0.03
MIN_PERSISTENCE = 0.7
MIN_WINDOWS = 3
KEPT_WINDOWS = 32
LENGTHS_EXPLAIN = 0.5
"""Share of a rank's extra computing time that its longer documents must explain before the data is blamed."""

Cause: TypeAlias = Literal["data", "card", "host", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWindow:
    """One rank's sums over a window, in seconds. None: not seen."""

    rank: int
    window: int
    step_s: float
    wait_s: float | None
    """Exposed communication."""
    data_s: float | None
    computing_s: float | None
    """forward + backward + optimizer + post, without communication."""
    host_s: float | None
    """scheduling, or on a CPU the time outside every phase."""
    work: float | None = None
    """What the batches ask for, in one unit on all ranks: operations, or the sum over documents of length^2."""

    def row(self) -> list[float]:
        """The plain numbers of a gather: NaN stands for None."""
        values = (self.rank, self.window, self.step_s, self.wait_s, self.data_s, self.computing_s, self.host_s)
        return [float("nan") if value is None else float(value) for value in (*values, self.work)]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> RankWindow:
        """The other direction of `row`."""
        known = [None if value != value else value for value in row]
        return cls(
            rank=int(row[0]),
            window=int(row[1]),
            step_s=row[2],
            wait_s=known[3],
            data_s=known[4],
            computing_s=known[5],
            host_s=known[6],
            work=known[7],
        )


ROW_LENGTH = 8


class Gather(Protocol):
    """Brings the rows of all ranks together without stopping the loop."""

    def submit(self, row: list[float]) -> None:
        """Send this rank's row (ROW_LENGTH numbers). Returns at once; every rank submits equally often."""

    def ready(self) -> list[list[list[float]]]:
        """The completed gathers not returned yet, oldest first: one row per rank each. Never blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRank:
    """The verdict after a window. `rank` is None when nobody can or need be named; `reason` says which."""

    rank: int | None
    share: float | None
    """How much longer the others waited than it, per step time."""
    persistence: float | None
    cause: Cause | None
    windows: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Accusation:
    """What one window says inside one group: who waited least, by how much, and whether it also had the most work."""

    rank: int | None
    share: float
    most_work: bool


class SlowRankWatch:
    """Keeps the last windows and judges them. `groups` are the ranks to compare with each other (default: all)."""

    def __init__(self, groups: Sequence[Sequence[int]] | None = None) -> None:
        if groups is not None:
            ranks = [rank for group in groups for rank in group]
            if len(set(ranks)) < len(ranks):
                raise ConfigError(f"a rank is compared inside one group only, got {groups}")
        self.groups = groups
        self.history: dict[int, deque[Accusation]] = {}
        """Per group, what each of the last windows said."""

    def judge(self, rows: Sequence[RankWindow]) -> SlowRank:
        """Take in one window of all ranks and say who, if anybody, is late."""
        if not rows:
            return nobody("no rank reported", 0)
        windows = sorted({row.window for row in rows})
        if len(windows) > 1:
            return nobody(f"the rows are of different windows: {windows}", 0)
        groups = self.groups or [[row.rank for row in rows]]
        by_rank = {row.rank: row for row in rows}
        verdicts = [
            self.judge_group(number, [by_rank[rank] for rank in group if rank in by_rank])
            for number, group in enumerate(groups)
        ]
        named = [verdict for verdict in verdicts if verdict.rank is not None]
        return max(named, key=lambda verdict: verdict.share or 0.0) if named else verdicts[0]

    def judge_group(self, number: int, members: Sequence[RankWindow]) -> SlowRank:
        """The verdict inside one group of ranks that do the same work."""
        history = self.history.setdefault(number, deque(maxlen=KEPT_WINDOWS))
        if len(members) < 2:
            return nobody("one rank waits for nobody", len(history))
        accusation = accuse(members)
        if accusation is None:
            return nobody("exposed communication is not measured on every rank: wrap the collectives", len(history))
        history.append(accusation)
        accused = Counter(one.rank for one in history if one.rank is not None)
        if not accused:
            return nobody(f"the others never wait {MIN_SHARE:.0%} of a step longer than one rank", len(history))
        suspect, count = accused.most_common(1)[0]
        persistence = count / len(history)
        share = float(np.median([one.share for one in history if one.rank == suspect]))
        if len(history) < MIN_WINDOWS:
            return nobody(f"{len(history)} of {MIN_WINDOWS} windows seen", len(history), share, persistence)
        if persistence < MIN_PERSISTENCE:
            return nobody(why_it_changes(history), len(history), share, persistence)
        row = next((row for row in members if row.rank == suspect), None)
        if row is None:
            return nobody(f"rank {suspect} was late and no longer reports", len(history), share, persistence)
        cause, why = cause_of(row, [other for other in members if other.rank != suspect])
        return SlowRank(
            rank=suspect, share=share, persistence=persistence, cause=cause, windows=len(history), reason=why
        )


def accuse(members: Sequence[RankWindow]) -> Accusation | None:
    """Who waited least in this window, and by how much; None when a rank's waits were not seen."""
    waits = [row.wait_s for row in members if row.wait_s is not None]
    if len(waits) < len(members):
        return None
    late = int(np.argmin(waits))
    others = waits[:late] + waits[late + 1 :]
    step_s = float(np.median([member.step_s for member in members]))
    share = (float(np.median(others)) - waits[late]) / step_s if step_s > 0.0 else 0.0
    works = [row.work for row in members if row.work is not None]
    most_work = len(works) == len(members) and works[late] == max(works) > min(works)
    return Accusation(rank=members[late].rank if share >= MIN_SHARE else None, share=share, most_work=most_work)


def why_it_changes(history: Sequence[Accusation]) -> str:
    """No rank is late often enough; perhaps the late one is always the one with the longest documents."""
    accusing = [one for one in history if one.rank is not None]
    if sum(one.most_work for one in accusing) >= MIN_PERSISTENCE * len(accusing):
        return "the late rank changes with the lengths of the documents: balance the batches"
    return f"no rank is late in {MIN_PERSISTENCE:.0%} of the windows"


def nobody(reason: str, windows: int, share: float | None = None, persistence: float | None = None) -> SlowRank:
    """A verdict that names no rank."""
    return SlowRank(rank=None, share=share, persistence=persistence, cause=None, windows=windows, reason=reason)


def cause_of(late: RankWindow, others: Sequence[RankWindow]) -> tuple[Cause, str]:
    """Where the late rank's extra time is: waiting for data or the host, computing more, or computing slower."""
    extra_host = excess(late.data_s, [row.data_s for row in others]) or 0.0
    extra_host += excess(late.host_s, [row.host_s for row in others]) or 0.0
    extra_computing = excess(late.computing_s, [row.computing_s for row in others])
    if max(extra_host, extra_computing or 0.0) <= 0.0:
        return "unknown", "none of the phases that were seen is longer on it"
    if extra_host > (extra_computing or 0.0):
        return "host", "it waits longer for data or for the host"
    if extra_computing is None or late.computing_s is None:
        return "unknown", "its computing was not seen"
    extra_work = excess(late.work, [row.work for row in others])
    if extra_work is None or not late.work:
        return "unknown", "it computes longer; without the lengths of the documents card and data look alike"
    # Computing in proportion to the work: what the longer documents alone would cost.
    explained = late.computing_s * extra_work / late.work
    if explained >= LENGTHS_EXPLAIN * extra_computing:
        return "data", "its documents are longer: balance the batches"
    return "card", "it computes longer on documents that are no longer"


def excess(own: float | None, others: Sequence[float | None]) -> float | None:
    """own - median of the others; None unless all are known."""
    known = [value for value in others if value is not None]
    if own is None or not known or len(known) < len(others):
        return None
    return own - float(np.median(known))


def computing_s(phases_ns: dict[str, int | None]) -> float | None:
    """Seconds of the computing phases; None when neither forward nor backward was seen."""
    if phases_ns.get("forward") is None or phases_ns.get("backward") is None:
        return None
    return sum(phases_ns.get(name) or 0 for name in COMPUTING) / 1e9
