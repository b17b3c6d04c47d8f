"""Traces in, verdicts out: finds the inputs, reads them, pairs collectives, and judges ranks and links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from headrace.errors import FormatError
from headrace.traces.bandwidth import CollectiveSpeed, KindOfCollective, by_kind, speed_of
from headrace.traces.clocks import ClockOffset, estimate_offsets
from headrace.traces.discover import Found, Input, discover
from headrace.traces.distributed_info import MAX_RANKS
from headrace.traces.groups import Ungrouped, group_collectives
from headrace.traces.kineto import peek_rank
from headrace.traces.named_rules import NamedRule, apply_named_rules
from headrace.traces.pairing import PairedGroup, pair
from headrace.traces.peers import waits_by_peer
from headrace.traces.reading import Progress, read_inputs
from headrace.traces.slow_link import SlowLink, judge_slow_link
from headrace.traces.slow_rank import SlowRank, judge_slow_rank
from headrace.traces.timeline import Group, RankTrace
from headrace.traces.training_log import TrainingLog, read_training_log
from headrace.traces.waits import RankWaits, Waits, by_durations

SLOWEST_KEPT = 50
MISSING_SHOWN = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """Everything `headrace analyze` knows; `document.py` writes it down."""

    traces: tuple[RankTrace, ...]
    """By rank."""
    world_size: int | None
    groups: tuple[PairedGroup, ...]
    ungrouped: tuple[Ungrouped, ...]
    waits: tuple[RankWaits, ...]
    waits_by_duration: Waits
    offsets: tuple[ClockOffset, ...]
    slowest: tuple[CollectiveSpeed, ...]
    """The longest collectives, at most SLOWEST_KEPT."""
    kinds: tuple[KindOfCollective, ...]
    slow_rank: SlowRank
    slow_link: SlowLink
    named_rules: tuple[NamedRule, ...]
    log: TrainingLog | None
    notes: tuple[str, ...]


def analyze(
    paths: Sequence[Path],
    *,
    groups: Sequence[Group] = (),
    keep_spans: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Analysis:
    """Analyse the traces under `paths`.

    `groups` names communication groups where the traces name none. `keep_spans` keeps intervals for export to a trace
    viewer. `progress` is called after every file. Raises ConfigError and FormatError; what is merely missing becomes a
    note and a verdict `undecidable`.
    """
    found = discover(paths)
    if found.inputs[0].kind == "training_log":
        return judge((), groups=groups, notes=found.notes, log=_only_log(found))
    _refuse_by_heads(found.inputs)
    traces = read_inputs(found.inputs, keep_spans=keep_spans, workers=workers, progress=progress)
    return judge(_by_rank(traces), groups=groups, notes=found.notes)


def judge(
    traces: Sequence[RankTrace],
    *,
    groups: Sequence[Group] = (),
    notes: Sequence[str] = (),
    log: TrainingLog | None = None,
) -> Analysis:
    """The analysis of traces already read: at most one per rank; a rank may be None only where it is alone."""
    ranked = [trace for trace in traces if trace.rank is not None]
    stated_size = _world_size(ranked)
    world_size = stated_size if stated_size is None or stated_size <= MAX_RANKS else None
    grouped, ungrouped = group_collectives(ranked, groups)
    paired = tuple(result for one in grouped if (result := pair(one)) is not None)
    instances = [instance for group in paired for instance in group.instances]
    waits = by_durations(instances, {trace.rank: trace.stage for trace in ranked if trace.rank is not None})
    speeds = sorted((speed_of(instance) for instance in instances), key=lambda speed: -speed.longest_ns)
    slow_link = judge_slow_link(traces)
    return Analysis(
        traces=tuple(traces),
        world_size=world_size,
        groups=paired,
        ungrouped=ungrouped,
        waits=waits_by_peer(ranked) or waits.of_rank,
        waits_by_duration=waits,
        offsets=estimate_offsets((trace.rank for trace in ranked if trace.rank is not None), instances),
        slowest=tuple(speeds[:SLOWEST_KEPT]),
        kinds=by_kind(speeds),
        slow_rank=judge_slow_rank(ranked, waits),
        slow_link=slow_link,
        named_rules=apply_named_rules(ranked, waits, slow_link.links, world_size),
        log=log,
        notes=(*notes, *_notes(ranked, stated_size)),
    )


def _refuse_by_heads(inputs: Sequence[Input]) -> None:
    """What is wrong with a set of Kineto files shows in their first kilobytes, before gigabytes are read."""
    heads = [(entry.path, *peek_rank(entry.path)) for entry in inputs if entry.kind == "kineto" and len(inputs) > 1]
    _refuse_mixture([(str(path), rank, world_size) for path, rank, world_size in heads])


def _only_log(found: Found) -> TrainingLog:
    if len(found.inputs) > 1:
        names = ", ".join(str(entry.path) for entry in found.inputs[:3])
        raise FormatError(f"{len(found.inputs)} training logs ({names}): analyse one at a time")
    return read_training_log(found.inputs[0].path)


def _by_rank(traces: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    """Sorted, checked: one job, every rank known and once."""
    unknown = [trace for trace in traces if trace.rank is None]
    if unknown and len(traces) > 1:
        raise FormatError(
            f"{unknown[0].source} does not say its rank, and {len(traces)} traces are to be compared: "
            "rename it to rank_<N>.json, or analyse it alone"
        )
    _refuse_mixture([(trace.source, trace.rank, trace.world_size) for trace in traces])
    return tuple(sorted(traces, key=lambda trace: -1 if trace.rank is None else trace.rank))


def _refuse_mixture(sources: Sequence[tuple[str, int | None, int | None]]) -> None:
    """FormatError when a rank is there twice, or when world sizes differ; (source, rank, world size) each."""
    by_rank: defaultdict[int, list[str]] = defaultdict(list)
    for source, rank, _ in sources:
        if rank is not None:
            by_rank[rank].append(source)
    for rank, own in by_rank.items():
        if len(own) > 1:
            raise FormatError(f"rank {rank} is there {len(own)} times ({', '.join(own)}): keep one of each rank")
    worlds = {world_size for _, _, world_size in sources if world_size is not None}
    if len(worlds) > 1:
        raise FormatError(f"traces of different jobs: world sizes {sorted(worlds)}; analyse one job at a time")


def _world_size(traces: Sequence[RankTrace]) -> int | None:
    """As the traces say; else what is visible: every rank that takes part in or is waited for."""
    said = {trace.world_size for trace in traces if trace.world_size is not None}
    if said:
        return max(said)
    seen = {trace.rank for trace in traces if trace.rank is not None}
    for trace in traces:
        seen |= {wait.peer for wait in trace.peer_waits}
        seen |= {rank for group in trace.groups for rank in group.ranks}
        seen |= {rank for load in trace.links for rank in (load.src, load.dst)}
    return max(seen) + 1 if len(seen) > 1 and not any(trace.format == "op_table" for trace in traces) else None


def _notes(traces: Sequence[RankTrace], stated_size: int | None) -> list[str]:
    notes = []
    ranks = {trace.rank for trace in traces if trace.rank is not None}
    if stated_size is not None and stated_size > MAX_RANKS:
        notes.append(f"a job of {stated_size:,} ranks is not believed (at most {MAX_RANKS:,}): its size is unknown")
    elif stated_size is not None and ranks and len(ranks) < stated_size:
        missing = list(islice((rank for rank in range(stated_size) if rank not in ranks), MISSING_SHOWN + 1))
        shown = ", ".join(map(str, missing[:MISSING_SHOWN])) + (", ..." if len(missing) > MISSING_SHOWN else "")
        notes.append(f"{len(ranks)} of {stated_size} ranks were traced; missing: {shown}")
    steps = [{lanes.step for lanes in trace.lanes} for trace in traces if trace.lanes]
    if len(steps) > 1 and not set.intersection(*steps):
        notes.append("the ranks were traced in different steps: nothing between them can be compared")
    elif len({frozenset(own) for own in steps}) > 1:
        notes.append("not all ranks were traced in the same steps; verdicts rest on those they share")
    return notes
