"""What a kernel's or a collective's name says about it: NVIDIA, AMD, Intel, Ascend, gloo."""

from __future__ import annotations

import re

from headrace.traces.timeline import TaskKind

_COMMUNICATION = re.compile(r"(?i)^(nccl|rccl|mscclpp?|msccl|oneccl|hccl|hcom|gloo:|mpi:|ucc:)")
_MATRIX = re.compile(
    r"(?i)gemm|gemv|wgmma|_mma_|xmma|cutlass|cublas|nvjet|matmul|cudnn.*(conv|fprop|dgrad|wgrad)|convolve|implicit_con|"
    r"winograd|flash_?(attn|fwd|bwd|attention)|fmha|attention_kernel|^cijk_|rocblas|tensile|hipblas|ck::.*(gemm|conv|fmha)|igemm"
)
_KINDS = (
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "send_recv"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
    ("receive", "recv"),
    ("recv", "recv"),
    ("send", "send"),
)
"""Longer names first: `reduce` is part of three others."""

SYMMETRIC = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Nobody leaves before all have come: only here does a short stay mean a late arrival. A broadcast's root may leave
early, a receiver waits for its sender by design."""

EXPOSED = "exposed_communication"
"""All communication of a step that nothing hid, as recorded live: it behaves like one symmetric collective, but has
no place on the time axis."""

TELLS_ARRIVAL = SYMMETRIC | {EXPOSED}

MAX_COUNT = 1 << 53
"""No collective has more elements: a larger number is a broken one."""

_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "int8": 1, "uint8": 1, "signed char": 1, "unsigned char": 1,
    "half": 2, "bfloat16": 2, "c10::half": 2, "c10::bfloat16": 2, "fp16": 2, "bfp16": 2, "bf16": 2,
    "short": 2, "int16": 2,
    "float": 4, "int": 4, "fp32": 4, "int32": 4, "uint32": 4,
    "double": 8, "long": 8, "fp64": 8, "int64": 8, "uint64": 8, "long int": 8,
}  # fmt: skip


def is_communication(name: str) -> bool:
    """Does this kernel (or range) move data between ranks? `ncclKernel_...`, `ncclDevKernel_...`, `oneccl_...`, ..."""
    return _COMMUNICATION.match(name) is not None


def compute_kind(name: str) -> TaskKind:
    """MATRIX for kernels that run on matrix units, VECTOR for all others. A guess by name: no trace says it."""
    return TaskKind.MATRIX if _MATRIX.search(name) else TaskKind.VECTOR


def collective_kind(name: str) -> str:
    """One name per operation, whatever the library calls it; `other` when it is none of the known."""
    letters = re.sub(r"[^a-z]", "", name.split("(")[0].lower())
    return next((kind for part, kind in _KINDS if part in letters), "other")


def element_bytes(dtype: str | None) -> int | None:
    """Bytes of one element of torch's, NCCL's or HCCL's type name; None for an unknown one."""
    if dtype is None:
        return None
    name = dtype.lower()
    return 1 if name.startswith(("float8", "fp8")) else _BYTES.get(name)


def message_bytes(
    kind: str, in_elements: int | None, out_elements: int | None, dtype: str | None, group_size: int | None
) -> int | None:
    """S of the nccl-tests (doc/PERFORMANCE.md): all-gather counts what everyone gets, reduce-scatter what everyone
    gives, all others one rank's buffer. None where the trace leaves something out."""
    width = element_bytes(dtype)
    elements = in_elements
    if kind == "all_gather":
        elements = out_elements
        if elements is None and in_elements is not None and group_size is not None:
            elements = in_elements * group_size
    if elements is None or width is None:
        return None
    return elements * width


def bus_factor(kind: str, group_size: int) -> float | None:
    """busbw / algbw of the nccl-tests: the share of the data that each link carries; None where it has no meaning."""
    if group_size < 2:
        return None
    if kind == "all_reduce":
        return 2 * (group_size - 1) / group_size
    if kind in {"reduce_scatter", "all_gather", "all_to_all"}:
        return (group_size - 1) / group_size
    if kind in {"broadcast", "reduce", "send", "recv"}:
        return 1.0
    return None
