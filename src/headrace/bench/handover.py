"""What does handing a batch over cost, apart from making it? The measuring body of `headrace bench handover`.

Three questions, each to the ring (shm/), to lean iceoryx2 where it runs, and to what no hand-over can be faster than:

ready     the batch is there: how long is the reader's call? Hot (one call after the other) and after a gap of 5 ms, in
          which caches and the branch predictor forget. The writer is silent meanwhile. Beside it "clock": nothing but
          the two looks at the clock that every value here includes. The same of a real feed (headrace.torch.Feed with
          PackedTokens, 1 x 4096): `next(feed)`, and with each field looked at.
blocked   all readers sleep: how long from the writer's stamp to the return of each reader's call? 1 to 8 readers; a
          value is one reader's, `slowest` the last one's. Beside it a bare futex wake between two processes, taken in
          turns with the others, so that all see the same machine.
idle      CPU of a rank that waits, beside a process that does nothing but wake as often (ten times a second, to see
          deaths in time), and CPU of the feeder at 5 ms steps.

A batch is one field of 128 bytes: filling it is not measured. How it can mislead: a wake of a halted core costs what
the (virtual) machine makes of it, tens of microseconds, so only the ratio to the bare futex travels; with more readers
than cores, readers also wait for a core. Nothing is pinned to cores: a training job's ranks are not either.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from headrace.bench.corpus import choose_corpus
from headrace.bench.figure import Figure, as_records
from headrace.bench.handover_actors import Contender, Reader, open_futex, open_iceoryx2, open_ring
from headrace.bench.handover_charges import FeedCharge, FeedTimes, ReaderCharge
from headrace.bench.iceoryx2_ring import missing_reason
from headrace.errors import ConfigError, HeadraceError
from headrace.measure.environment import capture_environment
from headrace.measure.statistics import median, p99

RECORD_VERSION = 1
ISOLATES = "the hand-over of a finished batch of 128 bytes; nothing is filled, copied or packed"

Row = dict[str, Any]

GAP_S = 0.005
NUM_SLOTS = 32
SEQ_LENGTH = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the user asks for. ConfigError for what cannot be measured."""

    num_readers: tuple[int, ...] = (1, 2, 4, 8)
    num_wakes: int = 400
    """Per contender and number of readers."""
    num_hot: int = 2000
    num_after_gap: int = 400
    idle_s: float = 10.0
    """A rank waits so long for a batch, and the feeder is watched for as long."""

    def __post_init__(self) -> None:
        if not self.num_readers or min(self.num_readers) < 1:
            raise ConfigError(f"num_readers must be one or more numbers of at least 1, got {self.num_readers}")
        for name in ("num_wakes", "num_hot", "num_after_gap", "idle_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")


def run(
    corpus_prefix: str | None = None, *, plan: Plan | None = None, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Measures everything of the plan; the record is JSON-able. `report` is told what begins.

    `corpus_prefix` None: see choose_corpus; only the real feed reads it. HeadraceError when a process of it fails.
    """
    plan = plan or Plan()
    skipped: dict[str, str] = {}
    if (reason := missing_reason()) is not None:
        skipped["iceoryx2"] = reason
    report("ready: ring" + ("" if skipped else " and iceoryx2"))
    rows = ready_rows(plan, with_iceoryx2=not skipped)
    for num_readers in plan.num_readers:
        report(f"blocked: {num_readers} reader{'s' if num_readers > 1 else ''}")
        rows += wake_rows(plan, num_readers, with_iceoryx2=not skipped)
    report(f"a real feed: ready, at {GAP_S * 1e3:g} ms steps, and idle for {plan.idle_s:g} s")
    feed = feed_times(plan, corpus_prefix)
    rows += feed_rows(feed)
    return {
        "version": RECORD_VERSION,
        "isolates": ISOLATES,
        "environment": asdict(capture_environment()),
        "plan": asdict(plan),
        "rows": rows,
        "skipped": skipped,
        "summary": summarise(rows, feed),
    }


def ready_rows(plan: Plan, *, with_iceoryx2: bool) -> list[Row]:
    """Ready hand-overs to one reader, in bursts: the contenders take turns, hot and after a gap."""
    with ExitStack() as stack:
        contenders: list[Contender] = [stack.enter_context(open_ring(1, NUM_SLOTS))]
        if with_iceoryx2:
            contenders.append(stack.enter_context(open_iceoryx2(1, NUM_SLOTS)))
        idler = Reader(ReaderCharge(contender="clock"))
        stack.callback(idler.close)
        idler.answer()
        burst = NUM_SLOTS // 2  # the writer is not to be woken in the middle of one
        values: dict[tuple[str, str], list[int]] = {}
        for state, count, gap_s in (("hot", plan.num_hot, 0.0), ("after_gap", plan.num_after_gap, GAP_S)):
            for _ in range(-(-count // burst)):
                for name, reader in [(one.name, one.readers[0]) for one in contenders] + [("clock", idler)]:
                    for one in contenders:
                        if one.name == name:
                            for _ in range(burst):
                                one.hand_over()
                    reader.command("ready", burst, gap_s)
                    values.setdefault((name, state), []).extend(reader.answer())
    return [
        summary_row("ready", name, nanoseconds, state=state, num_readers=1)
        for (name, state), nanoseconds in values.items()
    ]


def wake_rows(plan: Plan, num_readers: int, *, with_iceoryx2: bool) -> list[Row]:
    """Hand-overs to sleeping readers. Contenders take turns hand-over by hand-over: sleepers cost nobody anything."""
    with ExitStack() as stack:
        contenders: list[Contender] = [stack.enter_context(open_futex())]
        contenders.append(stack.enter_context(open_ring(num_readers, NUM_SLOTS)))
        if with_iceoryx2:
            contenders.append(stack.enter_context(open_iceoryx2(num_readers, NUM_SLOTS)))
        for contender in contenders:
            for reader in contender.readers:
                reader.command("wake", plan.num_wakes)
        writer_ns: dict[str, list[int]] = {contender.name: [] for contender in contenders}
        for number in range(plan.num_wakes):
            first = number % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                time.sleep(GAP_S)
                writer_ns[contender.name].append(contender.hand_over())
        latencies = {contender.name: [reader.answer() for reader in contender.readers] for contender in contenders}
    rows = []
    for name, of_readers in latencies.items():
        slowest = [max(one) for one in zip(*of_readers, strict=True)]
        everybody = [value for one in of_readers for value in one]
        rows.append(
            summary_row(
                "blocked",
                name,
                everybody,
                num_readers=len(of_readers),
                beside_readers=num_readers,
                slowest_median_us=us(median(slowest)),
                writer_median_us=us(median(writer_ns[name])),
            )
        )
    return rows


def feed_times(plan: Plan, corpus_prefix: str | None) -> FeedTimes:
    """Runs the rank with a real feed. Blocks. HeadraceError with its last words."""
    num_bursts = -(-plan.num_hot // (NUM_SLOTS // 2))
    paced_steps = int(plan.idle_s / GAP_S)
    num_batches = 4 * NUM_SLOTS + plan.num_hot + NUM_SLOTS + plan.num_after_gap + paced_steps
    with choose_corpus(corpus_prefix) as corpus:
        charge = FeedCharge(
            source={"prefix": corpus.prefix, "seq_length": SEQ_LENGTH, "num_samples": num_batches},
            num_slots=NUM_SLOTS,
            num_bursts=num_bursts,
            num_after_gap=plan.num_after_gap,
            gap_s=GAP_S,
            paced_s=plan.idle_s,
            idle_s=plan.idle_s,
        )
        done = subprocess.run(
            [sys.executable, "-m", "headrace.bench.handover_feed", msgspec.json.encode(charge).decode()],
            capture_output=True,
            check=False,
        )
    if done.returncode != 0:
        raise HeadraceError(f"the rank of the bench failed:\n{done.stderr.decode(errors='replace').strip()[-2000:]}")
    return msgspec.json.decode(done.stdout, type=FeedTimes)


def feed_rows(feed: FeedTimes) -> list[Row]:
    """The ready hand-over as a rank sees it."""
    named = (
        ("feed: next", "hot", feed.next_hot_ns),
        ("feed: next and fields", "hot", feed.hot_ns),
        ("feed: next", "after_gap", feed.next_after_gap_ns),
        ("feed: next and fields", "after_gap", feed.after_gap_ns),
    )
    return [summary_row("ready", name, values, state=state, num_readers=1) for name, state, values in named]


def summarise(rows: Sequence[Row], feed: FeedTimes) -> dict[str, Any]:
    """The figures of the issue, in microseconds and fractions, and whether they are reached."""
    woken, bare = found(rows, "blocked", "ring", num_readers=1), found(rows, "blocked", "futex", beside_readers=1)
    ratio = woken / bare if woken is not None and bare is not None else None
    summary: dict[str, Any] = {
        "ready_hot_us": found(rows, "ready", "ring", state="hot"),
        "ready_cold_us": found(rows, "ready", "ring", state="after_gap"),
        "feed_ready_hot_us": found(rows, "ready", "feed: next and fields", state="hot"),
        "feed_ready_cold_us": found(rows, "ready", "feed: next and fields", state="after_gap"),
        "blocked_wake_us": woken,
        "bare_futex_wake_us": bare,
        "blocked_wake_ratio": ratio,
        "idle_cpu_fraction": feed.idle_cpu_fraction,
        "bare_ticks_cpu_fraction": feed.bare_ticks_cpu_fraction,
        "feeder_cpu": feed.feeder_cpu,
        "paced_rank_cpu": feed.rank_cpu,
    }
    figures = [
        Figure(what="ready hand-over, hot, us", target=1.0, reached_by="at most", value=summary["ready_hot_us"]),
        Figure(
            what="ready hand-over, after 5 ms, us", target=10.0, reached_by="at most", value=summary["ready_cold_us"]
        ),
        Figure(what="one blocked reader woken, over a bare futex", target=1.3, reached_by="at most", value=ratio),
        Figure(what="CPU of a waiting rank", target=0.001, reached_by="at most", value=feed.idle_cpu_fraction),
        Figure(what="feeder at 5 ms steps, cores", target=0.1, reached_by="at most", value=feed.feeder_cpu),
    ]
    for kind, state in (
        ("ready", {"state": "hot"}),
        ("ready", {"state": "after_gap"}),
        ("blocked", {"num_readers": 1}),
    ):
        ours, theirs = found(rows, kind, "ring", **state), found(rows, kind, "iceoryx2", **state)
        figures.append(
            Figure(
                what=f"{kind} hand-over of lean iceoryx2 over the ring's ({next(iter(state.values()))})",
                target=1.0,
                reached_by="at least",
                value=theirs / ours if ours is not None and theirs is not None else None,
            )
        )
    return summary | {"figures": as_records(figures)}


def summary_row(kind: str, contender: str, nanoseconds: Sequence[int], **more: Any) -> Row:
    """Figures and the raw values they come from."""
    return {
        "kind": kind,
        "contender": contender,
        **more,
        "median_us": us(median(nanoseconds)),
        "p99_us": us(p99(nanoseconds)),
        "values_ns": list(nanoseconds),
    }


def found(rows: Sequence[Row], kind: str, contender: str, **more: Any) -> float | None:
    """The median of the first row that is so described, in microseconds."""
    wanted = {"kind": kind, "contender": contender, **more}
    return next((row["median_us"] for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def us(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e3
