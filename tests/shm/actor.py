"""A process of a ring that does what a test tells it, one call at a time: `python actor.py host|reader`.

Reads calls as JSON lines from stdin, answers each with one JSON line: the result, or the exception's class, text and
numbers. The tests decide when; nothing here sleeps or polls.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from typing import Any


def use_test_build(path: str) -> None:
    """Put another build of the extension (with crash points) in the place of the installed one."""
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("headrace._native", path, loader=ExtensionFileLoader("headrace._native", path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["headrace._native"] = module
    spec.loader.exec_module(module)


# ruff: noqa: E402 -- the build is chosen before anything imports it
if build := os.environ.get("HEADRACE_TEST_BUILD"):
    use_test_build(build)

import numpy as np

from headrace import _native
from headrace.shm import failure, handover
from headrace.shm.handover import Door, Invitation
from headrace.shm.layout import read_blob
from headrace.shm.peers import WRITER, Peer, Watch, open_pidfd, start_time
from headrace.shm.ring_reader import RingReader
from headrace.shm.ring_writer import DATA, END, ERROR, RingWriter
from headrace.shm.waiting import RingConfig
from headrace.spec import BatchSpec, Field


def spec_of(num_values: int) -> BatchSpec:
    return BatchSpec(fields=(Field(name="values", dtype="int64", shape=(num_values,)),))


def myself(who: str, rank: int | None) -> Peer:
    return Peer(who=who, rank=rank, pid=os.getpid(), started=start_time(os.getpid()), pidfd=open_pidfd(os.getpid()))


class Process:
    """What every actor can do."""

    def __init__(self) -> None:
        self.ticks = 0
        inherited = int(os.environ["HEADRACE_TEST_LOG_FD"])
        # The lowest number that is free: limits on descriptors are set by counting them.
        log = os.fdopen(os.dup(inherited), "a")
        os.close(inherited)
        logging.getLogger("headrace").addHandler(logging.StreamHandler(log))

    def pid(self) -> int:
        return os.getpid()

    def limit(self, name: str, value: int) -> None:
        resource.setrlimit(getattr(resource, name), (value, resource.getrlimit(getattr(resource, name))[1]))

    def num_descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def cpu_s(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    def run_beside(self) -> None:
        """A Python thread that counts for as long as it is let."""

        def count() -> None:
            while True:
                self.ticks += 1
                time.sleep(0.001)

        threading.Thread(target=count, daemon=True).start()

    def num_ticks(self) -> int:
        return self.ticks

    def exit(self) -> None:
        os._exit(0)


class Host(Process):
    """Whoever writes."""

    def listen(self) -> dict[str, str]:
        self.listener, self.invitation = handover.listen()
        self.door = Door(listener=self.listener, nonce=self.invitation.nonce)
        return {"address": self.invitation.address, "nonce": self.invitation.nonce}

    def admit(self, num_readers: int, pids: list[int] | None = None, timeout_s: float = 30.0) -> None:
        pids = pids or [0] * num_readers
        expected = {
            i: Peer(who=f"rank {i}", rank=i, pid=pid, started=start_time(pid) if pid else 0, pidfd=None)
            for i, pid in enumerate(pids)
        }
        try:
            self.door.admit(expected, timeout_s=timeout_s)
        except BaseException as error:
            self.door.refuse(error)
            self.door.close()
            raise

    def open(self, slot_bytes: int = 4096, max_slot_bytes: int = 1 << 26, **config: Any) -> int:
        people = {WRITER: myself("the feeder", None)} | {g.index: g.peer for g in self.door.guests.values()}
        self.watch = Watch(people)
        self.ring = RingWriter(
            RingConfig(**config),
            watch=self.watch,
            num_readers=len(people) - 1,
            slot_bytes=slot_bytes,
            max_slot_bytes=max_slot_bytes,
        )
        self.people = people
        return self.ring.slot_bytes

    def welcome(self) -> None:
        self.door.welcome(
            control_fd=self.ring.control_fd,
            data_fd=self.ring.data_fd,
            slot_bytes=self.ring.slot_bytes,
            people=self.people,
        )

    def refuse(self, text: str) -> None:
        self.door.refuse(ValueError(text))

    def publish(self, num_values: int = 16, count: int = 1, pace_s: float = 0.0) -> int:
        """`count` batches; each value of a batch is its version."""
        spec = spec_of(num_values)
        for _ in range(count):
            slot, arrays = self.ring.begin(spec)
            version = self.ring.published
            arrays["values"][:] = version
            self.ring.publish(slot, counts=(version, num_values), lengths=(), blob=b"%d" % version)
            if pace_s:
                time.sleep(pace_s)
        return self.ring.published

    def begin(self, num_values: int = 16) -> None:
        """Take a slot and write into it, but do not publish."""
        _, arrays = self.ring.begin(spec_of(num_values))
        arrays["values"][:] = -1

    def grow(self, num_values: int, die_before: str = "") -> int:
        def hand_out(fd: int, slot_bytes: int) -> None:
            if die_before == "hand_out":
                os.kill(os.getpid(), signal.SIGKILL)
            self.door.hand_out_data(fd, slot_bytes)
            if die_before == "resize":
                os.kill(os.getpid(), signal.SIGKILL)

        self.ring.grow(spec_of(num_values), blob_bytes=64, hand_out=hand_out)
        return self.ring.slot_bytes

    def end(self) -> None:
        self.ring.finish(END)

    def fail(self, text: str) -> None:
        try:
            raise ValueError(text)
        except ValueError as error:
            self.ring.finish(ERROR, failure.encode(error))

    def check_readers(self) -> None:
        self.ring.check_readers()

    def position(self) -> int:
        return self.ring.published

    def fork_and_close(self) -> int:
        """A child that closes what it has inherited. Returns its exit status."""
        child = os.fork()
        if child == 0:
            self.ring.close()
            self.door.close()
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def fork_and_keep(self) -> int:
        """A child that only lives. Returns its pid."""
        child = os.fork()
        if child == 0:
            signal.pause()
        return child

    def close(self) -> None:
        self.ring.close()
        self.watch.close()
        self.door.close()


class Lender(_native.Lender):
    """As a feed takes batches: those of known arrays in one native call, the others by `next` and `arrays`."""

    def __init__(self, ring: RingReader[np.ndarray]) -> None:
        self._ring, self._hold = ring, ring.config.hold
        ring.lend_to(self, _native.Batch)

    def _next_slowly(self) -> _native.Batch | _native.Delivery:
        delivery = self._ring.next()
        if delivery[2] != DATA:
            return delivery
        return _native.Batch(self._ring.arrays(delivery), 0, delivery[4], None, self._ring.slot(delivery))


class Reader(Process):
    """Whoever reads."""

    def knock(self, invitation: dict[str, str], index: int, state: str = "") -> None:
        self.index = index
        self.connection = handover.knock(Invitation(**invitation), index=index, rank=index, state=state.encode())

    def enter(self, **config: Any) -> None:
        unknown = Peer(who="the feeder", rank=None, pid=0, started=0, pidfd=None)
        admission = handover.enter(self.connection, unknown, timeout_s=30.0)
        self.watch = Watch(admission.peers)
        writer = admission.peers[WRITER]
        try:
            self.ring: RingReader[np.ndarray] = RingReader(
                RingConfig(**config),
                index=self.index,
                who=f"rank {self.index}",
                control_fd=admission.control_fd,
                data_fd=admission.data_fd,
                slot_bytes=admission.slot_bytes,
                watch=self.watch,
                receive_data=lambda: handover.receive_data(self.connection, writer, timeout_s=30.0),
                wrap=lambda array: array,
            )
        finally:
            os.close(admission.control_fd)
            os.close(admission.data_fd)
        self.lender = Lender(self.ring)

    def next(self, count: int = 1) -> dict[str, Any]:
        """`count` versions; checks each one's content, tells of the last."""
        for _ in range(count):
            taken = next(self.lender)
            if isinstance(taken, tuple):
                if taken[2] == ERROR:
                    raise failure.decode(self.ring.blob(taken))
                return {"version": taken[0], "kind": taken[2], "num_values": 0}
            version, num_values = taken._counts[:2]
            self.values = taken["values"]
            assert version == self.ring.version - 1, f"version {self.ring.version - 1} came with counts {taken._counts}"
            assert num_values == len(self.values)
            assert (self.values == version).all(), f"version {version} is torn or overwritten"
            assert read_blob(taken._memory) == b"%d" % version
        return {"version": version, "kind": DATA, "num_values": num_values}

    def held_values(self) -> list[int]:
        """The distinct values in the arrays of the last batch, as they are now."""
        return sorted({int(value) for value in self.values})

    def write_into_batch(self) -> None:
        self.values[:] = -5

    def release(self) -> None:
        self.ring.release()

    def claim_again(self) -> None:
        RingReader(
            RingConfig(),
            index=self.index,
            who="an impostor",
            control_fd=self.control_fd(),
            data_fd=-1,
            slot_bytes=0,
            watch=self.watch,
            receive_data=lambda: (0, 0),
            wrap=lambda array: array,
        )

    def control_fd(self) -> int:
        """Open the control segment of this process's own mapping once more."""
        for name in os.listdir("/proc/self/map_files"):
            if "headrace-control" in os.readlink(f"/proc/self/map_files/{name}"):
                return os.open(f"/proc/self/map_files/{name}", os.O_RDWR)
        raise FileNotFoundError("no control segment is mapped")

    def num_segments(self) -> int:
        """Distinct data segments that this process still maps."""
        with open("/proc/self/maps") as maps:
            return len({line.split()[4] for line in maps if "headrace-data" in line})

    def next_while_closing(self) -> str:
        """Wait in a thread, close from this one; what did the waiting thread get?"""
        caught: list[str] = []
        waiting = self.ring.num_waits

        def wait() -> None:
            try:
                next(self.lender)
            except Exception as error:
                caught.append(type(error).__name__)

        thread = threading.Thread(target=wait)
        thread.start()
        while self.ring.num_waits == waiting:
            time.sleep(0.01)
        self.ring.close()
        thread.join()
        return caught[0]

    def next_in_two_threads(self) -> list[str]:
        """Two threads in one end: what do they get?"""
        caught: list[str] = []

        def wait() -> None:
            try:
                next(self.lender)
            except Exception as error:
                caught.append(type(error).__name__)

        threads = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        while not caught:
            time.sleep(0.01)
        return caught

    def fork_and_read(self) -> str:
        """What a forked child gets that reads, closes and exits."""
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                next(self.lender)
                answer = "a batch"
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            self.ring.close()
            os.write(tell, answer.encode())
            os._exit(0)
        os.close(tell)
        os.waitpid(child, 0)
        answer = os.read(told, 4096).decode()
        os.close(told)
        return answer

    def fail_inside_a_batch(self) -> None:
        """A user's exception with live views, through closing the ring."""
        next(self.lender)
        try:
            raise ZeroDivisionError("the user's own")
        finally:
            self.ring.close()

    def wait_stats(self) -> dict[str, int]:
        return {"num_waits": self.ring.num_waits, "wait_ns": self.ring.wait_ns}

    def close(self, keep_views: bool = False) -> None:
        self.ring.close()
        self.watch.close()
        self.connection.close()
        if not keep_views:
            self.values = np.empty(0)
        gc.collect()


def numbers(error: BaseException) -> dict[str, Any]:
    names = ("rank", "pid", "version", "need", "have", "knob", "timeout_s")
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


def main() -> None:
    actor = {"host": Host, "reader": Reader}[sys.argv[1]]()
    print(json.dumps({"result": os.getpid()}), flush=True)
    while line := sys.stdin.readline():
        call = json.loads(line)
        try:
            answer = {"result": getattr(actor, call["call"])(*call["args"], **call["kwargs"])}
        except BaseException as error:
            answer = {"error": type(error).__name__, "text": str(error), "numbers": numbers(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
