"""Any interleaving: the real ring does what its twin does, and no batch changes while it is held."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.shm.ring_writer import END, ERROR

from .rings import RealRing, TwinRing, released_of

readers = st.integers(0, 2)


class RingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.finished = False
        self.attached: set[int] = set()
        self.left: set[int] = set()

    @initialize(data=st.data(), num_slots=st.integers(2, 5), num_readers=st.integers(1, 3))
    def make(self, data: st.DataObject, num_slots: int, num_readers: int) -> None:
        hold = data.draw(st.integers(1, num_slots - 1))
        self.num_slots, self.num_readers, self.hold = num_slots, num_readers, hold
        self.real, self.twin = RealRing(num_slots, num_readers, hold), TwinRing(num_slots, num_readers, hold)

    def can(self, reader: int) -> bool:
        return reader in self.attached - self.left

    @rule(reader=readers)
    def attach(self, reader: int) -> None:
        if reader < self.num_readers and reader not in self.attached:
            self.attached.add(reader)
            self.real.attach(reader)
            self.twin.attach(reader)

    @precondition(lambda self: not self.finished)
    @rule(num_values=st.sampled_from([0, 1, 17, 4_000, 4_600, 9_000, 30_000]))
    def publish(self, num_values: int) -> None:
        assert self.real.publish(num_values) == self.twin.publish(num_values)

    @precondition(lambda self: not self.finished)
    @rule(kind=st.sampled_from([END, ERROR]))
    def finish(self, kind: int) -> None:
        self.finished = self.real.finish(kind)
        assert self.twin.finish(kind) == self.finished

    @rule(reader=readers)
    def take(self, reader: int) -> None:
        if self.can(reader):
            assert self.real.take(reader) == self.twin.take(reader)

    @rule(reader=readers)
    def release(self, reader: int) -> None:
        if self.can(reader):
            self.real.release(reader)
            self.twin.release(reader)

    @rule(reader=readers)
    def leave(self, reader: int) -> None:
        if self.can(reader):
            self.left.add(reader)
            self.real.leave(reader)
            self.twin.leave(reader)

    @invariant()
    def both_say_the_same(self) -> None:
        if not hasattr(self, "real"):
            return
        assert self.real.writer.published == len(self.twin.published)
        assert self.real.writer.slot_bytes == self.twin.slot_bytes
        assert released_of(self.real) == released_of(self.twin)

    @invariant()
    def no_batch_changes_while_it_is_held(self) -> None:
        for reader in self.attached - self.left:
            assert self.real.held(reader) == self.twin.held(reader)
            assert all(values <= {version} for version, values in self.real.held(reader))

    @invariant()
    def the_writer_never_laps_the_slowest_reader(self) -> None:
        if hasattr(self, "real"):
            slowest = min(released_of(self.real))
            assert slowest == float("inf") or self.real.writer.published - slowest <= self.num_slots

    def teardown(self) -> None:
        if hasattr(self, "real"):
            self.real.close()


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
