"""Makes RankTraces of imagined jobs directly, without files: what pairing, waits and verdicts are tested on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.traces.timeline import Collective, Group, RankTrace, StepLanes

MS = 1_000_000
TRANSFER = 2 * MS


def collective(rank_start: int, duration: int, *, step=None, kind="all_reduce", group=None, **facts) -> Collective:
    return Collective(step=step, kind=kind, start_ns=rank_start, duration_ns=duration, group=group, **facts)


def lanes(step: int, *, e2e=100 * MS, computing=60 * MS, idle=10 * MS, data=0) -> StepLanes:
    """A step whose communication fills what computing and idle time leave."""
    waiting = e2e - computing - idle
    return StepLanes(
        step=step,
        e2e_ns=e2e,
        computing_ns=computing,
        matrix_ns=computing // 2,
        communication_ns=waiting,
        overlapped_ns=0,
        copies_ns=0,
        exposed_copies_ns=0,
        data_ns=data,
        host_launch_ns=idle - data,
        kernel_wait_ns=0,
        unknown_ns=0,
    )


def synchronous_job(
    num_ranks: int,
    steps: Sequence[int],
    busy_ns: Callable[[int, int], int],
    *,
    idle_ns: Callable[[int, int], int] = lambda rank, step: 0,
    offset_ns: Callable[[int], int] = lambda rank: 0,
    collectives_per_step: int = 3,
    stage: Callable[[int], int | None] = lambda rank: None,
    host: Callable[[int], str | None] = lambda rank: None,
    numbered: bool = True,
) -> tuple[RankTrace, ...]:
    """Every rank works `busy_ns + idle_ns`, then meets all others in a collective, `collectives_per_step` times over.

    The clocks of the ranks differ by `offset_ns`; nobody who reads the traces may care.
    """
    group = Group(name="0", ranks=tuple(range(num_ranks)))
    met: dict[int, list[Collective]] = {rank: [] for rank in range(num_ranks)}
    rows: dict[int, list[StepLanes]] = {rank: [] for rank in range(num_ranks)}
    now, number = 0, 0
    for step in steps:
        begin = now
        for _ in range(collectives_per_step):
            arrive = {
                rank: now + (busy_ns(rank, step) + idle_ns(rank, step)) // collectives_per_step
                for rank in range(num_ranks)
            }
            leave = max(arrive.values()) + TRANSFER
            for rank, moment in arrive.items():
                met[rank].append(
                    collective(
                        moment + offset_ns(rank),
                        leave - moment,
                        step=step,
                        group=group,
                        sequence=number if numbered else None,
                        in_elements=1000,
                        dtype="Float",
                        num_bytes=4000,
                    )
                )
            now = leave
            number += 1
        for rank in range(num_ranks):
            rows[rank].append(lanes(step, e2e=now - begin, computing=busy_ns(rank, step), idle=idle_ns(rank, step)))
    return tuple(
        RankTrace(
            rank=rank,
            source=f"rank {rank}",
            format="kineto",
            device="gpu",
            world_size=num_ranks,
            stage=stage(rank),
            host=host(rank),
            lanes=tuple(rows[rank]),
            collectives=tuple(met[rank]),
            groups=(group,),
        )
        for rank in range(num_ranks)
    )
