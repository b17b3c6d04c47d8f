"""The events of a Kineto file that matter, as msgspec sees them. Everything else never becomes more than a bare tag.

  kernel, gpu_memcpy, gpu_memset   when the device worked; `correlation` leads to the call that launched it
  *_runtime, *_driver              when the CPU called
  user_annotation                  step marks, data loading, gloo's collectives
  cpu_op                           computing, on CPU jobs only

Time stamps come in three conventions: integer microseconds since the epoch (old), floats since the epoch (2024), and
three decimals relative to `baseTimeNanoseconds` (now; kineto's output_json.h). All become integer nanoseconds. A float
holds 16 digits, so "16 digits and 3 decimals" is read as text.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.traces.intervals import Nanoseconds
from headrace.traces.json_events import NOT_JSON
from headrace.traces.kernel_names import MAX_COUNT
from headrace.traces.time_bounds import EARLIEST_NS, LATEST_NS, LONGEST_NS

NO_ARGS = msgspec.Raw(b"{}")
NO_DURATION = -1.0
"""Of an event without one. One that is written as negative is broken."""

EARLIEST_US, LATEST_US, LONGEST_US = EARLIEST_NS / 1000, LATEST_NS / 1000, LONGEST_NS / 1000
Moment: TypeAlias = Annotated[float, msgspec.Meta(ge=EARLIEST_US, le=LATEST_US)]
Duration: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=LONGEST_US)]
Identifier: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
"""What the decoder lets pass; a batch with anything else is decoded as LooseEvent, which finds the broken event."""


class Correlated(msgspec.Struct, gc=False):
    """`args` of calls and copies."""

    correlation: Identifier = -1


class KernelArgs(msgspec.Struct, gc=False):
    """`args` of kernels; all but the first are there on collectives only, and not on all of them."""

    correlation: Identifier = -1
    collective: str | None = msgspec.field(name="Collective name", default=None)
    in_elements: Count | None = msgspec.field(name="In msg nelems", default=None)
    out_elements: Count | None = msgspec.field(name="Out msg nelems", default=None)
    group_size: Count | None = msgspec.field(name="Group size", default=None)
    dtype: str | None = None
    group_name: str | int | None = msgspec.field(name="Process Group Name", default=None)
    group_ranks: str | list[int] | None = msgspec.field(name="Process Group Ranks", default=None)
    sequence: Identifier | None = msgspec.field(name="Seq", default=None)


class _Tagged(msgspec.Struct, gc=False, tag_field="cat"):
    """The decoder picks the class by category and skips the fields it does not name. Fields stand in the order of
    kineto's writer, where msgspec looks first."""


class Kernel(_Tagged, tag="kernel"):
    name: str = ""
    ts: Moment = 0.0
    dur: Duration = NO_DURATION
    args: KernelArgs = msgspec.field(default_factory=KernelArgs)


class Copy(_Tagged, tag="gpu_memcpy"):
    ts: Moment = 0.0
    dur: Duration = NO_DURATION
    args: Correlated = msgspec.field(default_factory=Correlated)


class Fill(Copy, tag="gpu_memset"):
    pass


class Call(_Tagged, tag="cuda_runtime"):
    ts: Moment = 0.0
    args: Correlated = msgspec.field(default_factory=Correlated)


class DriverCall(Call, tag="cuda_driver"):
    pass


class XpuCall(Call, tag="xpu_runtime"):
    pass


class PrivateUseCall(Call, tag="privateuse1_runtime"):
    pass


CALLS = frozenset({Call, DriverCall, XpuCall, PrivateUseCall})
COPIES = frozenset({Copy, Fill})


class Range(_Tagged, tag="user_annotation"):
    name: str = ""
    tid: int | str | None = None
    ts: Moment = 0.0
    dur: Duration = NO_DURATION
    args: msgspec.Raw = NO_ARGS


class Operator(_Tagged, tag="cpu_op"):
    name: str = ""
    tid: int | str | None = None
    ts: Moment = 0.0
    dur: Duration = NO_DURATION


class BareOperator(_Tagged, tag="cpu_op"):
    """Where a device computes, operators do not matter."""


class _Arrow(_Tagged, tag="ac2g"):
    pass


class _OldArrow(_Tagged, tag="async_cpu_to_gpu"):
    pass


class _BackwardArrow(_Tagged, tag="fwdbwd"):
    pass


class _DeviceRange(_Tagged, tag="gpu_user_annotation"):
    pass


class _Frame(_Tagged, tag="python_function"):
    pass


class _Span(_Tagged, tag="Trace"):
    pass


class _Instant(_Tagged, tag="cpu_instant_event"):
    pass


class _Overhead(_Tagged, tag="overhead"):
    pass


class _Synchronisation(_Tagged, tag="cuda_sync"):
    pass


_Passed: TypeAlias = (
    _Arrow | _OldArrow | _BackwardArrow | _DeviceRange | _Frame | _Span | _Instant | _Overhead | _Synchronisation
)
_Wanted: TypeAlias = Kernel | Copy | Fill | Call | DriverCall | XpuCall | PrivateUseCall | Range
DeviceJobEvent: TypeAlias = _Wanted | BareOperator | _Passed
AnyJobEvent: TypeAlias = _Wanted | Operator | _Passed
"""Unions for the decoder: fast, but only for the categories listed here and numbers as time stamps."""

Event: TypeAlias = Kernel | Copy | Call | Range | Operator


class LooseEvent(msgspec.Struct, gc=False):
    """Any event at all: categories of other vendors, events without one, stamps as text. Slower, never refused."""

    cat: str | None = None
    name: str | None = None
    tid: int | str | None = None
    ts: msgspec.Raw = msgspec.Raw(b"0")
    dur: msgspec.Raw = msgspec.Raw(b"")
    args: msgspec.Raw = NO_ARGS

    def typed(self, origin_us: int) -> Event | None:
        """The event as its own class, its start relative to `origin_us`; None for what does not matter.

        Raises ValueError or ArithmeticError for times that cannot be.
        """
        kind = _CLASS_OF_CATEGORY.get(self.cat or "")
        if kind is None:
            return None
        name, start_us = self.name or "", _microseconds(self.ts, origin_us, EARLIEST_US, LATEST_US)
        if kind is Call:
            return Call(ts=start_us, args=Correlated(_correlation(self.args)))
        duration_us = _microseconds(self.dur, 0, 0.0, LONGEST_US) if len(self.dur) else NO_DURATION
        if kind is Kernel:
            return Kernel(name=name, ts=start_us, dur=duration_us, args=_kernel_args(self.args))
        if kind is Range:
            return Range(name=name, tid=self.tid, ts=start_us, dur=duration_us, args=self.args)
        if kind is Operator:
            return Operator(name=name, tid=self.tid, ts=start_us, dur=duration_us)
        return Copy(ts=start_us, dur=duration_us, args=Correlated(_correlation(self.args)))


def arguments(args: msgspec.Raw) -> dict[str, Any]:
    """`args` as a dictionary; empty when it is none."""
    try:
        decoded = msgspec.json.decode(args)
    except NOT_JSON:
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _kernel_args(args: msgspec.Raw) -> KernelArgs:
    """As much of them as has the type it should have."""
    try:
        return msgspec.json.decode(args, type=KernelArgs)
    except NOT_JSON:
        return KernelArgs(correlation=_correlation(args))


def _correlation(args: msgspec.Raw) -> int:
    try:
        return msgspec.json.decode(args, type=Correlated).correlation
    except NOT_JSON:
        return Correlated().correlation


def microseconds_to_ns(microseconds: npt.NDArray[np.float64]) -> Nanoseconds:
    """Round to whole nanoseconds. Exact for integers below 2**53, and for three decimals below 2**43 (101 days)."""
    whole = np.floor(microseconds)
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)


def _microseconds(text: msgspec.Raw, origin_us: int, least: float, most: float) -> float:
    digits = bytes(text).strip(b'"').decode()
    value = float(Decimal(digits) - origin_us) if origin_us else float(digits)
    if not least <= value <= most:
        raise ValueError(f"{digits[:40]} is no time of an event")
    return value


_CLASS_OF_CATEGORY: dict[str, type[Event]] = {
    **dict.fromkeys(("kernel", "Kernel", "hpu_op", "mtia_ccp_events"), Kernel),
    **dict.fromkeys(("gpu_memcpy", "gpu_memset", "Memcpy", "Memset"), Copy),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "xpu_runtime", "xpu_driver"), Call),
    **dict.fromkeys(("mtia_runtime", "glow_runtime", "privateuse1_runtime", "privateuse1_driver"), Call),
    **dict.fromkeys(("runtime", "Runtime"), Call),
    "user_annotation": Range,
    **dict.fromkeys(("cpu_op", "Operator"), Operator),
}

DEVICE_CATEGORIES = frozenset(
    category for category, kind in _CLASS_OF_CATEGORY.items() if kind is Kernel or kind is Copy
)
