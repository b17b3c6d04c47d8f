"""iceoryx2 as a ring of batches, as lean as its Python interface allows: the opponent of shm/ in the benches.

One publisher that blocks while a subscriber is full, N subscribers, an event service to sleep on (a subscriber itself
cannot wait). Nothing is copied on the way: the publisher packs into loaned samples, subscribers keep one view per
address, as iceoryx2's samples stay where they are. What a batch must say in numbers lies in the sample's first bytes.

iceoryx2 0.10.0: a blocking `send` polls while a subscriber is full, with the GIL held, and a process killed meanwhile
leaves its files. So each bench has a prefix and a folder of its own, and `Place.sweep` removes both.
"""

from __future__ import annotations

import ctypes
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from headrace.errors import FeedTimeout
from headrace.spec import FIELD_ALIGNMENT, BatchSpec, align

NUM_COUNTS = 16
"""Integers (int64) at the start of a sample: one line of 128 bytes, before the fields."""
_HEADER_BYTES = 8 * NUM_COUNTS
CONNECT_TIMEOUT_S = 60.0
_SHARED_MEMORY = Path("/dev/shm")

Counts: TypeAlias = "ctypes.Array[ctypes.c_int64]"


def missing_reason() -> str | None:
    """Why iceoryx2 cannot run here; None if it can."""
    try:
        import iceoryx2  # noqa: F401
    except ImportError as error:
        return f"{error}; pip install 'headrace[bench]' (iceoryx2 has wheels for x86-64 with glibc >= 2.34 only)"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the files of one run lie, apart from any other iceoryx2 on this machine."""

    prefix: str
    folder: str

    @classmethod
    def make(cls) -> Place:
        """A new one. The caller sweeps it when all its processes have ended."""
        return cls(prefix=f"headrace_{secrets.token_hex(4)}_", folder=tempfile.mkdtemp(prefix="headrace-iceoryx2-"))

    def sweep(self) -> None:
        """Remove what killed processes left."""
        for path in _SHARED_MEMORY.glob(f"{self.prefix}*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


class Services:
    """The two services of a ring, opened by everybody who takes part."""

    def __init__(self, place: Place, *, num_slots: int, num_readers: int) -> None:
        import iceoryx2 as iox2

        iox2.set_log_level(iox2.LogLevel.Error)
        config = iox2.config.default()
        config.global_cfg.prefix = iox2.FileName.new(place.prefix)
        config.global_cfg.root_path = iox2.Path.new(place.folder)
        self.num_slots, self.num_readers = num_slots, num_readers
        self.node = (
            iox2.NodeBuilder.new()
            .config(config)
            .signal_handling_mode(iox2.SignalHandlingMode.Disabled)
            .create(iox2.ServiceType.Ipc)
        )
        name, num_nodes = iox2.ServiceName.new("headrace/bench"), num_readers + 2
        self.batches = (
            self.node.service_builder(name)
            .publish_subscribe(iox2.Slice[ctypes.c_uint8])
            .payload_alignment(iox2.Alignment.new(FIELD_ALIGNMENT))
            .max_publishers(1)
            .max_subscribers(num_readers)
            .max_nodes(num_nodes)
            .history_size(0)
            # One batch more than a ring of num_slots holds: those that wait, and the one being read.
            .subscriber_max_buffer_size(num_slots)
            .subscriber_max_borrowed_samples(2)
            .enable_safe_overflow(False)
            .open_or_create()
        )
        self.events = (
            self.node.service_builder(name)
            .event()
            .max_notifiers(1)
            .max_listeners(num_readers)
            .max_nodes(num_nodes)
            .open_or_create()
        )


class Publisher:
    """Writes fields of `spec` into loaned samples. For one thread."""

    def __init__(self, services: Services, spec: BatchSpec) -> None:
        import iceoryx2 as iox2

        self._services = services
        self._places, self._nbytes = lay_out(spec)
        self._views: dict[int, tuple[Counts, dict[str, np.ndarray]]] = {}
        self._publisher = (
            services.batches.publisher_builder()
            .initial_max_slice_len(self._nbytes)
            .max_loaned_samples(1)
            .allocation_strategy(iox2.AllocationStrategy.Static)
            .backpressure_strategy(iox2.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self._notifier = services.events.notifier_builder().create()

    def wait_for_readers(self) -> None:
        """Blocks until every reader is connected: iceoryx2 delivers from then on only. FeedTimeout."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while self._services.events.dynamic_config.number_of_listeners < self._services.num_readers:
            if time.monotonic() > deadline:
                raise FeedTimeout(f"{self._services.num_readers} iceoryx2 subscribers", timeout_s=CONNECT_TIMEOUT_S)
            time.sleep(0.01)

    def begin(self) -> tuple[Any, Counts, dict[str, np.ndarray]]:
        """A loaned sample, its counts (NUM_COUNTS of them) and its fields at full capacity, to be filled in place."""
        sample = self._publisher.loan_slice_uninit(self._nbytes)
        address = sample.payload_ptr
        known = self._views.get(address)
        if known is None:
            known = counts_at(address), fields_of(memory_at(address, self._nbytes), self._places)
            self._views[address] = known
        return sample, *known

    def publish(self, sample: Any) -> None:
        """Give it to every reader and wake those that sleep. Blocks while one of them is full."""
        sample.assume_init().send()
        self._notifier.notify()


class Subscriber:
    """Takes samples in order. `receive` hands the one before back. Making it blocks until the publisher is there."""

    def __init__(self, services: Services) -> None:
        import iceoryx2 as iox2

        self._subscriber = services.batches.subscriber_builder().buffer_size(services.num_slots).create()
        self._tick = iox2.Duration.from_millis(100)
        self._held: Any = None
        # A subscriber connects when it looks for samples, not when it is made. Until then the publisher does not wait
        # for it: the first batch beyond the buffer was lost in one start of four.
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while services.batches.dynamic_config.number_of_publishers == 0:
            if time.monotonic() > deadline:
                raise FeedTimeout("the iceoryx2 publisher", timeout_s=CONNECT_TIMEOUT_S)
            time.sleep(0.01)
        self._subscriber.has_samples()
        self._listener = services.events.listener_builder().create()  # only now: this is what the publisher waits for

    def receive(self) -> int:
        """The address of the next sample, valid until the next call. Blocks until there is one."""
        if self._held is not None:
            self._held.delete()
        self._held = self._subscriber.receive()
        while self._held is None:
            self._listener.timed_wait(self._tick)
            self._held = self._subscriber.receive()
        address: int = self._held.payload_ptr
        return address


def lay_out(spec: BatchSpec) -> tuple[dict[str, tuple[int, int, str, tuple[int, ...]]], int]:
    """(offset, bytes, dtype, shape) of each field in a sample, and the bytes of a sample."""
    places, end = {}, _HEADER_BYTES
    for field in spec.fields:
        places[field.name] = (end, field.nbytes, field.dtype, field.shape)
        end += align(field.nbytes, FIELD_ALIGNMENT)
    return places, end


def memory_at(address: int, nbytes: int) -> np.ndarray:
    """The bytes of a sample (uint8). Nothing keeps them mapped but the port they came from."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def counts_at(address: int) -> Counts:
    """The numbers at the start of a sample, read and written as Python ints: no NumPy call, slow after an idle gap."""
    return (ctypes.c_int64 * NUM_COUNTS).from_address(address)


def fields_of(memory: np.ndarray, places: dict[str, tuple[int, int, str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    """The fields of a sample at full capacity."""
    return {
        name: memory[offset : offset + nbytes].view(dtype).reshape(shape)
        for name, (offset, nbytes, dtype, shape) in places.items()
    }
