"""Collectives of a Kineto trace: from kernel arguments (NCCL, RCCL) or from gloo's ranges."""

from __future__ import annotations

import math
from functools import cache

from headrace.traces.distributed_info import MAX_RANKS, DistributedInfo, parse_ranks
from headrace.traces.kernel_names import MAX_COUNT, collective_kind, message_bytes
from headrace.traces.kineto_columns import NamedRange
from headrace.traces.kineto_events import KernelArgs
from headrace.traces.timeline import Collective, Group


def device_collective(
    name: str, args: KernelArgs, info: DistributedInfo, *, step: int | None, start_ns: int, duration_ns: int
) -> Collective:
    """A collective kernel. torch writes what it knows into the kernel's args; in coalesced calls it knows nothing
    (pytorch#131462), then only the kernel's name speaks and `group` is None."""
    kind = collective_kind(args.collective or name)
    if kind == "other":
        kind = collective_kind(name)
    group = _group_of(args, info)
    group_size = args.group_size or (len(group.ranks) if group else None)
    return Collective(
        step=step,
        kind=kind,
        start_ns=start_ns,
        duration_ns=duration_ns,
        group=group,
        sequence=args.sequence,
        in_elements=args.in_elements,
        out_elements=args.out_elements,
        dtype=args.dtype,
        num_bytes=message_bytes(kind, args.in_elements, args.out_elements, args.dtype, group_size),
    )


def gloo_collective(named: NamedRange, info: DistributedInfo, step: int | None) -> Collective:
    """gloo records input shapes and types (with record_shapes=True), but neither group nor number. If all declared
    groups hold the same ranks, that is the group; otherwise nobody can tell, and `group` stays None."""
    kind = collective_kind(named.name.partition(":")[2])
    dims, types = named.args.get("Input Dims"), named.args.get("Input type")
    elements = _num_elements(dims)
    dtype = types[0] if isinstance(types, list) and types and isinstance(types[0], str) else None
    group = the_only_group(info)
    return Collective(
        step=step,
        kind=kind,
        start_ns=named.start_ns,
        duration_ns=named.duration_ns,
        group=group,
        in_elements=elements,
        dtype=dtype or None,
        num_bytes=message_bytes(kind, elements, None, dtype, len(group.ranks) if group else None),
    )


def the_only_group(info: DistributedInfo) -> Group | None:
    """The one set of ranks that all declared groups of more than one rank share; None when they differ."""
    sets = {group.ranks for group in info.groups if len(group.ranks) > 1}
    return Group(name="", ranks=next(iter(sets))) if len(sets) == 1 else None


def _group_of(args: KernelArgs, info: DistributedInfo) -> Group | None:
    name = "" if args.group_name is None else str(args.group_name)
    if ranks := parse_ranks(args.group_ranks):
        return Group(name=name, ranks=tuple(sorted(ranks)))
    # torch cuts the list after 30 ranks; the envelope has all of them
    declared = next((group for group in info.groups if group.name == name), None) if name else None
    if declared is None and info.world_size and args.group_size == info.world_size <= MAX_RANKS:
        return Group(name=name, ranks=_all_ranks(info.world_size))
    return declared


@cache
def _all_ranks(world_size: int) -> tuple[int, ...]:
    """One tuple for all collectives of a job."""
    return tuple(range(world_size))


def _num_elements(dims: object) -> int | None:
    """Elements over all input tensors of a recorded call; None where no shape was recorded."""
    if not isinstance(dims, list) or not dims:
        return None
    shapes = [shape for shape in dims if isinstance(shape, list) and all(isinstance(size, int) for size in shape)]
    count = sum(math.prod(shape) for shape in shapes)
    return count if shapes and 0 <= count <= MAX_COUNT else None
