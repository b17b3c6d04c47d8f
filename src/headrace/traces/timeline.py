"""What every reader makes of one rank's trace, and the types the analysis speaks in.

Readers know file formats, the analysis knows these types; neither knows the other. Times are integer nanoseconds of
the rank's own clock: clocks of different ranks are never compared before `clocks.py` has estimated their offsets.
`None` means that the trace cannot say; it is never a zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.traces.intervals import EMPTY, IntervalSet, Nanoseconds, union

DeviceKind: TypeAlias = Literal["gpu", "npu", "cpu"]

NO_STEP = -1
NO_LAUNCH = int(np.iinfo(np.int64).min)
"""A task whose launching call is not in the trace."""


class TaskKind(IntEnum):
    """What a task occupies the device with."""

    MATRIX = 0
    """Matrix units: GEMM, convolution, fused attention; AI_CORE tasks on Ascend."""
    VECTOR = 1
    """Every other compute kernel; on a CPU job every operator."""
    COMMUNICATION = 2
    RECEIVE = 3
    """Point-to-point receive: waiting for the neighbouring pipeline stage, the bubble."""
    COPY = 4
    """Copies and fills between host and device memory or inside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The framework's step marks (ProfilerStep#N, STEP_TIME), sorted by start, one entry per step."""

    numbers: npt.NDArray[np.int64]
    start_ns: Nanoseconds
    end_ns: Nanoseconds

    def __len__(self) -> int:
        return len(self.numbers)

    def index_of(self, moment_ns: Nanoseconds) -> npt.NDArray[np.int64]:
        """int64 [n]: index of the step each moment lies in, NO_STEP outside all of them."""
        if len(self) == 0:
            return np.full(len(moment_ns), NO_STEP)
        index = np.searchsorted(self.start_ns, moment_ns, side="right") - 1
        inside = (index >= 0) & (moment_ns < self.end_ns[np.maximum(index, 0)])
        return np.where(inside, index, NO_STEP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tasks:
    """What ran on the device (on a CPU job: operators and collectives), one entry per task, in any order."""

    start_ns: Nanoseconds
    end_ns: Nanoseconds
    kind: npt.NDArray[np.uint8]
    """TaskKind of each."""
    step: npt.NDArray[np.int64]
    """Index into Steps, NO_STEP outside all. A task belongs to the step whose code launched it."""
    launch_ns: Nanoseconds
    """When the CPU called for it, NO_LAUNCH where unknown."""

    def __len__(self) -> int:
        return len(self.start_ns)

    def where(self, chosen: npt.NDArray[np.bool_]) -> Tasks:
        """The chosen tasks only."""
        return Tasks(
            start_ns=self.start_ns[chosen],
            end_ns=self.end_ns[chosen],
            kind=self.kind[chosen],
            step=self.step[chosen],
            launch_ns=self.launch_ns[chosen],
        )

    def covered(self, *kinds: TaskKind) -> IntervalSet:
        """The moments in which at least one task of these kinds runs."""
        chosen = np.zeros(len(self), dtype=bool)
        for kind in kinds:
            chosen |= self.kind == int(kind)  # numpy takes three times as long to compare with the member itself
        return union(self.start_ns[chosen], self.end_ns[chosen]) if chosen.any() else EMPTY


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One rank's tasks and steps, ready for `breakdown.py`."""

    device: DeviceKind
    steps: Steps
    tasks: Tasks
    loading: IntervalSet
    """When the training process was loading data (DataLoader, `data` ranges); empty where the trace names none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLanes:
    """Where one step's time went. computing + (communication - overlapped) + free = e2e, exactly."""

    step: int | None
    """The framework's step number; None for a window that is no step."""
    start_ns: int | None = None
    e2e_ns: int
    computing_ns: int | None
    matrix_ns: int | None = None
    """Share of computing on matrix units; the rest is vector work."""
    communication_ns: int | None
    overlapped_ns: int | None
    """Communication hidden behind computing."""
    copies_ns: int | None = None
    """All copies; they count as free time, as in Ascend's step_trace_time.csv."""
    exposed_copies_ns: int | None = None
    """Copies while nothing computes or communicates."""
    bubble_ns: int | None = None
    """Sum of the durations of point-to-point receives."""
    exposed_bubble_ns: int | None = None
    """Time in which nothing but a receive runs."""
    preparing_ns: int | None = None
    """From the step mark to the first task on the device."""
    data_ns: int | None = None
    host_launch_ns: int | None = None
    kernel_wait_ns: int | None = None
    unknown_ns: int | None = None
    """data + host_launch + kernel_wait + unknown = idle (see free_time.py)."""

    @property
    def not_overlapped_ns(self) -> int | None:
        """Communication that nothing hides."""
        if self.communication_ns is None or self.overlapped_ns is None:
            return None
        return self.communication_ns - self.overlapped_ns

    @property
    def free_ns(self) -> int | None:
        """Time in which the device neither computes nor communicates."""
        if self.computing_ns is None:
            return None
        return self.e2e_ns - self.computing_ns - (self.not_overlapped_ns or 0)

    @property
    def idle_ns(self) -> int | None:
        """Free time without the copies in it."""
        if self.free_ns is None:
            return None
        return self.free_ns - (self.exposed_copies_ns or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that communicate together. `name` tells groups over the same ranks apart; "" where a trace gives none."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One rank's part in one collective operation."""

    step: int | None
    kind: str
    """One of `kernel_names.collective_kind`: all_reduce, all_gather, ..., send, recv."""
    start_ns: int
    duration_ns: int
    group: Group | None
    """None where the trace does not say who takes part."""
    key: str | None = None
    """Identifies the operation on all ranks of its group (Ascend's operation names do); None where nothing does."""
    sequence: int | None = None
    """The group's running number of it, as torch recorded it (not to be trusted blindly, see pairing.py)."""
    in_elements: int | None = None
    out_elements: int | None = None
    dtype: str | None = None
    num_bytes: int | None = None
    """The size S of the nccl-tests: the whole buffer, for all-gather and reduce-scatter over all ranks."""

    @property
    def end_ns(self) -> int:
        """When this rank was done with it."""
        return self.start_ns + self.duration_ns

    @property
    def signature(self) -> tuple[str, int | None, int | None, str | None]:
        """What the same operation has in common on all ranks."""
        if self.kind in {"all_to_all", "gather", "scatter"}:  # sizes differ from rank to rank
            return self.kind, None, None, self.dtype
        return self.kind, self.in_elements, self.out_elements, self.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerWait:
    """How long a rank waited for signals of one peer inside one operation (Ascend's Notify_Wait)."""

    step: int | None
    operation: str
    peer: int
    wait_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkLoad:
    """What went over one link in one step."""

    step: int | None
    src: int
    dst: int
    transport: str
    """HCCS, PCIE, RDMA, SIO, ..."""
    num_bytes: float
    time_ns: float
    group: str = ""
    ranks_are_local: bool = False
    """src and dst count inside their group, because the trace does not say which ranks it joins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PacketSizes:
    """How a transport's bytes were cut, over all operations of a rank."""

    transport: str
    num_bytes: float
    mean_bytes: float
    """Of one packet."""
    large_share: float
    """Share of the bytes in packets that Ascend calls large: over 32 MB (HCCS, PCIE, SIO), over 0.5 MB (RDMA)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitTimes:
    """Ascend's own account of a rank's collectives, as published: only the tasks of the master plane are in it."""

    elapse_ns: int
    transit_ns: int
    wait_ns: int
    idle_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchDelay:
    """From the CPU's call to the task's start, microseconds. Waiting behind earlier work in the queue is part of it."""

    num_launches: int
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """All that was learnt from one rank's files; small, and picklable from a reading process to the analysis."""

    rank: int | None
    source: str
    """The file or folder it came from."""
    format: str
    device: DeviceKind | None = None
    world_size: int | None = None
    host: str | None = None
    chip: str | None = None
    stage: int | None = None
    """Pipeline stage, where the trace names it."""
    lanes: tuple[StepLanes, ...] = ()
    windows: tuple[tuple[str, StepLanes], ...] = ()
    """Lanes over other stretches than single steps, by name."""
    published: tuple[StepLanes, ...] = ()
    """The profiler's own breakdown, where it wrote one."""
    collectives: tuple[Collective, ...] = ()
    groups: tuple[Group, ...] = ()
    """All groups the trace declares, used or not."""
    peer_waits: tuple[PeerWait, ...] = ()
    links: tuple[LinkLoad, ...] = ()
    packets: tuple[PacketSizes, ...] = ()
    wait_times: WaitTimes | None = None
    launch_delay: LaunchDelay | None = None
    spans: tuple[tuple[str, IntervalSet], ...] = ()
    """Lane name and its intervals, kept only for export."""
    num_events: int = 0
    skipped_events: int = 0
    notes: tuple[str, ...] = ()
    """What is missing or doubtful, one sentence each."""
