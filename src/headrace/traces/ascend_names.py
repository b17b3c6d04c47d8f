"""What Ascend's names mean: task types, operation names, and the groups a profile declares."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.traces.distributed_info import parse_ranks
from headrace.traces.timeline import Group, PeerWait, TaskKind

TASK_KINDS = {
    **dict.fromkeys(("AI_CORE", "MIX_AIC", "KERNEL_AICORE", "KERNEL_MIX_AIC"), TaskKind.MATRIX),
    **dict.fromkeys(("AI_VECTOR_CORE", "MIX_AIV", "KERNEL_AIVEC", "KERNEL_MIX_AIV", "DSA_SQE"), TaskKind.VECTOR),
    **dict.fromkeys(("AI_CPU", "KERNEL_AICPU"), TaskKind.VECTOR),
    **dict.fromkeys(("PCIE_DMA_SQE", "SDMA_SQE", "MEMCPY_ASYNC"), TaskKind.COPY),
}
"""Task type -> what it occupies. Types that only wait, record or serve a collective are left out."""

NOTIFY_WAIT = "Notify_Wait"
NO_PEER = 4294967295

_OPERATION = re.compile(r"^(?:hcom_|Hccl)\w+?__\d+_\d+")
_GROUP_SUFFIX = re.compile(r"__(\d+)_")


def is_operation(name: str) -> bool:
    """A whole collective on the device (hcom_allReduce__586_0_1): neither one of its small steps nor the host's call
    (HcclAllreduce)."""
    return _OPERATION.match(name) is not None


def same_group(operation: str, group_id: str) -> bool:
    """hcom_allReduce__586_0_1 carries the last three digits of its group's id."""
    found = _GROUP_SUFFIX.search(operation)
    return found is not None and group_id.endswith(found.group(1))


def declared_groups(metadata: Mapping[str, Any]) -> dict[str, Group]:
    """Group id -> its ranks, from `parallel_group_info` of profiler_metadata.json or META_DATA; {} where absent."""
    info = metadata.get("parallel_group_info")
    if not isinstance(info, dict):
        return {}
    groups = {}
    for group_id, entry in info.items():
        ranks = parse_ranks(entry.get("global_ranks")) if isinstance(entry, dict) else None
        if ranks:
            groups[str(group_id)] = Group(name=str(entry.get("group_name", group_id)), ranks=ranks)
    return groups


def group_of_operation(operation: str, group_id: str, groups: Mapping[str, Group]) -> Group | None:
    """The ranks behind an operation: by its group id, else by the id's last digits if only one group has them."""
    if group_id in groups:
        return groups[group_id]
    fitting = [group for known_id, group in groups.items() if same_group(operation, known_id)]
    return fitting[0] if len(fitting) == 1 else None


def stage_of(rank: int | None, groups: Iterable[Group]) -> int | None:
    """Pipeline stage: the rank's place in its group named `pp`."""
    for group in groups:
        if group.name.lower() in {"pp", "pipeline", "pipeline_model_parallel_group"} and rank in group.ranks:
            return group.ranks.index(rank) if rank is not None else None
    return None


def peer_of(own: int | None, src: int, dst: int) -> int | None:
    """Whom a Notify_Wait waits for: the end of the pair that is not this rank."""
    if NO_PEER in (src, dst) or src == dst:
        return None
    return src if dst == own else dst


def sum_peer_waits(waits: Iterable[PeerWait]) -> tuple[PeerWait, ...]:
    """One entry per step, operation and peer."""
    total: dict[tuple[int | None, str, int], int] = {}
    for wait in waits:
        key = (wait.step, wait.operation, wait.peer)
        total[key] = total.get(key, 0) + wait.wait_ns
    return tuple(
        PeerWait(step=step, operation=operation, peer=peer, wait_ns=wait_ns)
        for (step, operation, peer), wait_ns in total.items()
    )
