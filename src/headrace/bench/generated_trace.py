"""Writes Kineto traces of any size that look like a GPU training job's, for benchmarks and tests.

The mix of events follows published traces (HolisticTraceAnalysis, tests/data: per device event 4 CPU operators, 2.4
runtime calls and 3.5 flow arrows), and so does the layout: operators first, then runtime and device, then metadata.
Times come from a seeded generator, so a file is the same wherever it is written. Collectives carry torch's metadata;
`late_us` makes a rank arrive late in each of them, and `waits_us` makes the others wait.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BASE_TIME_NS = 1_755_000_000_000_000_000

_KERNELS = (
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_tn_align8>(Params)",
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_nn",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3>)",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float, "
    "c10::BFloat16 const*, c10::BFloat16 const*, c10::BFloat16 const*, float*, float*, c10::BFloat16*)",
)
_OPS = ("aten::linear", "aten::t", "aten::addmm", "aten::as_strided", "aten::empty", "aten::view", "aten::layer_norm")
_CALLS = ("cudaEventQuery", "cudaStreamIsCapturing", "cudaEventRecordWithFlags")
_STREAM, _COMMUNICATION_STREAM = 7, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceShape:
    """What a generated trace holds. The default is the size of the published figures: 216 k events, 54 MB."""

    num_steps: int = 16
    launches_per_step: int = 1225
    """Kernels per step; every 40th is a copy."""
    collective_every: int = 150
    """So many launches, then an all-reduce on a second stream."""
    transfer_us: float = 400.0
    late_us: float = 0.0
    """This rank reaches each collective so much later than it would."""
    waits_us: float = 0.0
    """This rank spends so much longer in each collective: it waits for a late one."""
    has_sequence_numbers: bool = True


def write_gpu_trace(path: Path, *, rank: int = 0, world_size: int = 8, shape: TraceShape | None = None) -> int:
    """Write one rank's trace; returns the number of its events. Device events wait in a temporary file, since kineto
    writes them after all operators."""
    count = 0
    with path.open("w") as file, tempfile.TemporaryFile("w+") as device_part:
        file.write(_head(rank, world_size))
        for count, (on_device, event) in enumerate(_events(rank, world_size, shape or TraceShape()), start=1):
            target = device_part if on_device else file
            target.write(("  {\n    " if count == 1 else ",\n  {\n    ") + event + "\n  }")
        device_part.seek(0)
        shutil.copyfileobj(device_part, file)
        file.write(f'\n  ],\n  "traceName": "{path.name}",\n  "displayTimeUnit": "ms",\n')
        file.write(f'  "baseTimeNanoseconds": {BASE_TIME_NS}\n}}\n')
    return count


def _head(rank: int, world_size: int) -> str:
    group = (
        f'{{"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": {world_size}, '
        f'"ranks": {list(range(world_size))}}}'
    )
    return (
        '\n{\n  "schemaVersion": 1,\n  "deviceProperties": [\n    {"id": 0, "name": "NVIDIA H100", "numSms": 132}\n'
        f'  ],\n  "distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": {world_size}, "pg_count": 1, '
        f'"pg_config": [{group}], "nccl_version": "2.21.5"}},\n  "traceEvents": [\n'
    )


def _events(rank: int, world_size: int, shape: TraceShape) -> Iterator[tuple[bool, str]]:
    """(belongs to the part behind the operators, event)"""
    rng = random.Random(f"headrace trace {rank}")
    pid = 4000 + rank
    host_us, device_us, ident = 1_000_000.0, 1_000_050.0, 1
    for step in range(shape.num_steps):
        step_start_us = host_us
        for launch in range(1, shape.launches_per_step + 1):
            yield from ((False, event) for event in _operators(rng, pid, host_us, ident))
            host_us += rng.uniform(18, 26)
            yield from ((True, event) for event in _launch(rng, pid, host_us, ident))
            start_us, busy_us = max(device_us, host_us + 4), rng.uniform(8, 30)
            task = _copy(start_us, busy_us, ident) if launch % 40 == 0 else _kernel(rng, start_us, busy_us, ident)
            yield True, task
            device_us = start_us + busy_us
            ident += 1
            if launch % shape.collective_every == 0:
                device_us += shape.late_us
                yield from ((True, event) for event in _launch(rng, pid, host_us + 2, ident))
                spent_us = shape.transfer_us + shape.waits_us + rng.uniform(0, 2)
                sequence = step * 1000 + launch // shape.collective_every if shape.has_sequence_numbers else None
                yield True, _all_reduce(world_size, device_us, spent_us, ident, sequence)
                device_us += spent_us
                ident += 1
        host_us = max(host_us, device_us - 40)
        yield False, _range(f"ProfilerStep#{step + 10}", pid, step_start_us - 1, host_us - step_start_us, ident)
        host_us += 2
    yield from ((True, event) for event in _metadata(pid, host_us))


def _operators(rng: random.Random, pid: int, at_us: float, ident: int) -> Iterator[str]:
    for depth in range(4):
        number = ident * 8 + depth
        yield (
            f'"ph": "X", "cat": "cpu_op", "name": "{rng.choice(_OPS)}", "pid": {pid}, "tid": {pid},\n'
            f'    "ts": {at_us + depth:.3f}, "dur": {16 - 2 * depth + rng.random():.3f},\n    "args": {{\n'
            f'      "External id": {number},"Record function id": 0, "Sequence number": {ident}, "Fwd thread id": 0, '
            f'"Input Dims": [[1, 4096, 1024], []], "Ev Idx": {number}\n    }}'
        )
    if rng.random() < 0.3:
        yield _arrow("s", "fwdbwd", pid, at_us, ident)


def _launch(rng: random.Random, pid: int, at_us: float, ident: int) -> Iterator[str]:
    """The launching call, one or two calls beside it, and kineto's arrows from calls to the device."""
    for number, name in enumerate(("cudaLaunchKernel", *rng.choices(_CALLS, k=rng.choice((1, 1, 2))))):
        own = ident if number == 0 else 10_000_000 + ident * 4 + number
        yield (
            f'"ph": "X", "cat": "cuda_runtime", "name": "{name}", "pid": {pid}, "tid": {pid},\n'
            f'    "ts": {at_us + number:.3f}, "dur": {3 + rng.random():.3f},\n    "args": {{\n'
            f'      "External id": {own}, "cbid": 211, "correlation": {own}\n    }}'
        )
        yield _arrow("f", "ac2g", pid, at_us + number, own) + ', "bp": "e"'
    yield _arrow("s", "ac2g", pid, at_us, ident)


def _arrow(phase: str, category: str, pid: int, at_us: float, ident: int) -> str:
    return (
        f'"ph": "{phase}", "id": {ident}, "pid": {pid}, "tid": {pid}, "ts": {at_us:.3f},\n'
        f'    "cat": "{category}", "name": "{category}"'
    )


def _kernel(rng: random.Random, start_us: float, busy_us: float, ident: int) -> str:
    return (
        f'"ph": "X", "cat": "kernel", "name": "{rng.choice(_KERNELS)}", "pid": 0, "tid": {_STREAM},\n'
        f'    "ts": {start_us:.3f}, "dur": {busy_us:.3f},\n    "args": {{\n      "External id": {ident},"queued": 0, '
        f'"device": 0, "context": 1, "stream": {_STREAM}, "correlation": {ident}, "registers per thread": 40, '
        '"shared memory": 49152, "blocks per SM": 4.740741, "warps per SM": 75.851852, "grid": [512, 1, 1], '
        '"block": [512, 1, 1], "est. achieved occupancy %": 75\n    }'
    )


def _copy(start_us: float, busy_us: float, ident: int) -> str:
    return (
        f'"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": {_STREAM},\n'
        f'    "ts": {start_us:.3f}, "dur": {busy_us:.3f},\n    "args": {{\n      "External id": {ident},"device": 0, '
        f'"context": 1, "stream": {_STREAM}, "correlation": {ident}, "bytes": 4096, '
        '"memory bandwidth (GB/s)": 0.5\n    }'
    )


def _all_reduce(world_size: int, start_us: float, spent_us: float, ident: int, sequence: int | None) -> str:
    numbered = "" if sequence is None else f', "Seq": {sequence}'
    return (
        '"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage'
        f'<4096ul>)", "pid": 0, "tid": {_COMMUNICATION_STREAM},\n    "ts": {start_us:.3f}, "dur": {spent_us:.3f},\n'
        f'    "args": {{\n      "External id": {ident},"queued": 0, "device": 0, "context": 1, '
        f'"stream": {_COMMUNICATION_STREAM}, "correlation": {ident}, "Collective name": "allreduce", '
        f'"In msg nelems": 4194304, "Out msg nelems": 4194304, "Group size": {world_size}, "dtype": "BFloat16", '
        '"In split size": "[]", "Out split size": "[]", "Process Group Name": "0", "Process Group Description": '
        f'"default_pg", "Process Group Ranks": "{list(range(world_size))}"{numbered}\n    }}'
    )


def _range(name: str, pid: int, start_us: float, busy_us: float, ident: int) -> str:
    return (
        f'"ph": "X", "cat": "user_annotation", "name": "{name}", "pid": {pid}, "tid": {pid},\n'
        f'    "ts": {start_us:.3f}, "dur": {busy_us:.3f},\n    "args": {{\n      "External id": {ident},'
        f'"Record function id": 0, "Ev Idx": {ident}\n    }}'
    )


def _metadata(pid: int, at_us: float) -> Iterator[str]:
    for name, value in (("process_name", "python"), ("process_labels", "CPU")):
        yield (
            f'"name": "{name}", "ph": "M", "ts": {at_us:.3f}, "pid": {pid}, "tid": 0,\n'
            f'    "args": {{\n      "{name.split("_")[1]}": "{value}"\n    }}'
        )
    yield (f'"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": {at_us:.3f}')
