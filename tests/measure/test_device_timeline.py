"""The breakdown on a device that works behind the host: its own times, read late, and never waited for."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.measure import device_timeline
from headrace.measure.step import Step

from .fakes import MS, FakeClock, FakeDevice


class Loop:
    """A loop that asks a fake device for work: `ask_ms` is the host's share, `work_ms` the device's."""

    def __init__(self, **options):
        self.clock = FakeClock()
        self.device = FakeDevice(self.clock)
        self.steps = []
        options.setdefault("new_event", self.device.new_event)
        self.step = Step(clock=self.clock, sink=lambda times, payload: self.steps.append(times), **options)

    def span(self, name, *, ask_ms, work_ms):
        with getattr(self.step, name):
            self.device.launch(work_ms)
            self.clock.advance(ms=ask_ms)

    def wait_for_batch(self, ms):
        with self.step.data:
            self.clock.advance(ms=ms)


def test_the_host_returns_at_once_and_the_device_works_ten_milliseconds():
    """petals #456 and many others: without events the phase would look as short as the call."""
    loop = Loop()
    for _ in range(6):
        loop.span("forward", ask_ms=0.01, work_ms=10)
        loop.clock.advance(ms=9.99)
        loop.step.end()
    times = loop.steps[3]
    assert times.timeline == "device"
    assert times.phases_ns["forward"] == pytest.approx(10 * MS, abs=2)
    assert times.host_ns["forward"] == 0.01 * MS


def test_steps_come_when_the_device_has_passed_them_and_the_loop_never_waits():
    loop = Loop()
    for _ in range(3):
        loop.span("forward", ask_ms=1, work_ms=50)
        loop.step.end()
    assert loop.steps == []
    loop.clock.advance(ms=200)
    loop.step.end()
    assert [times.index for times in loop.steps] == [0, 1, 2]
    assert loop.device.synchronised == 0
    assert all(times.phases_ns["forward"] == pytest.approx(50 * MS, abs=2) for times in loop.steps)


def test_a_group_is_complete_as_soon_as_the_device_has_passed_its_last_step():
    loop = Loop(deliver_every=4)
    seen = []
    for _ in range(10):
        loop.span("forward", ask_ms=1, work_ms=10)
        loop.step.end()
        loop.clock.advance(ms=9)
        seen.append(len(loop.steps))
    assert seen == [0, 0, 0, 3, 4, 4, 4, 7, 8, 8]
    assert loop.device.synchronised == 0


def test_closing_waits_once_and_delivers_what_the_device_still_owes():
    loop = Loop()
    for _ in range(3):
        loop.span("forward", ask_ms=1, work_ms=50)
        loop.step.end()
    loop.step.close()
    assert [times.index for times in loop.steps] == [0, 1, 2]
    assert loop.device.synchronised == 3


def test_data_that_hides_behind_the_device_costs_nothing_and_data_that_does_not_is_what_the_device_waited():
    loop = Loop()
    for _ in range(5):
        loop.wait_for_batch(ms=4)
        loop.span("forward", ask_ms=1, work_ms=20)
        loop.clock.advance(ms=15)
        loop.step.end()
    hidden = loop.steps[-1]
    assert hidden.phases_ns["data"] == 0
    assert hidden.host_ns["data"] == 4 * MS

    loop = Loop()
    for _ in range(5):
        loop.wait_for_batch(ms=30)
        loop.span("forward", ask_ms=1, work_ms=20)
        loop.step.end()
    exposed = loop.steps[-1]
    # The device still works 19 ms on the last forward when the host begins to wait for 30 ms.
    assert exposed.phases_ns["data"] == pytest.approx(11 * MS, abs=2)
    assert exposed.phases_ns["forward"] == pytest.approx(20 * MS, abs=2)


def test_idle_between_spans_while_the_host_is_busy_elsewhere_is_scheduling():
    loop = Loop()
    for _ in range(6):
        loop.span("forward", ask_ms=1, work_ms=5)
        # Python between the phases. The device still has 4 ms of the last backward and 5 ms of this forward to do when
        # the forward is asked for, 1 ms before the pause of 14 ms: it runs dry for 6 ms.
        loop.clock.advance(ms=14)
        loop.span("backward", ask_ms=1, work_ms=5)
        loop.step.end()
    times = loop.steps[-1]
    assert times.phases_ns["scheduling"] == pytest.approx(6 * MS, abs=4)
    assert times.phases_ns["other"] == pytest.approx(0, abs=4)


def test_work_asked_for_outside_the_spans_is_other_not_scheduling():
    loop = Loop()
    for _ in range(6):
        loop.span("forward", ask_ms=1, work_ms=5)
        loop.device.launch(30)  # say, clipping gradients outside every span
        loop.clock.advance(ms=1)
        loop.span("backward", ask_ms=1, work_ms=5)
        loop.step.end()
        loop.clock.advance(ms=40)
        with loop.step.data:
            loop.clock.advance(ms=1)
    loop.step.end()
    loop.step.end()
    times = loop.steps[-3]
    assert times.phases_ns["other"] >= 29 * MS
    assert times.step_ns == sum(value for value in times.phases_ns.values() if value is not None)


def test_exposed_communication_is_the_time_the_stream_was_held():
    loop = Loop()
    for _ in range(5):
        with loop.step.backward:
            loop.device.launch(10)
            loop.span("communication", ask_ms=0.1, work_ms=6)
        loop.clock.advance(ms=17)
        loop.step.end()
    phases = loop.steps[-1].phases_ns
    assert phases["communication"] == pytest.approx(6 * MS, abs=2)
    assert phases["backward"] == pytest.approx(10 * MS, abs=2)


def test_an_asynchronous_device_without_events_has_a_step_time_and_no_phases():
    loop = Loop(new_event=None, blind="this backend has no timed events")
    loop.span("forward", ask_ms=1, work_ms=50)
    with loop.step.evaluation:
        loop.clock.advance(ms=9)
    loop.step.end()
    (times,) = loop.steps
    assert (times.timeline, times.step_ns) == ("host", MS)
    assert times.phases_ns["forward"] is None
    assert times.reasons["forward"] == "this backend has no timed events"
    assert times.phases_ns["other"] == times.step_ns
    assert times.excluded_ns == {"evaluation": 9 * MS}


def test_events_that_fail_cost_the_device_times_and_nothing_else(caplog):
    loop = Loop()

    def broken():
        raise RuntimeError("capturing a graph")

    loop.step.device.new_event = broken
    with caplog.at_level(logging.WARNING, "headrace.measure"):
        for _ in range(3):
            loop.span("forward", ask_ms=2, work_ms=2)
            loop.step.end()
        loop.step.close()
    assert len(loop.steps) == 3
    assert all("capturing a graph" in times.reasons["forward"] for times in loop.steps)
    assert all(times.step_ns == 2 * MS for times in loop.steps)


def test_events_that_cannot_be_read_cost_that_step_only():
    loop = Loop()
    for index in range(4):
        loop.span("forward", ask_ms=2, work_ms=2)
        if index == 1:
            loop.step.device.marks[1].event.elapsed_time = None
        loop.step.end()
    loop.step.close()
    assert [times.timeline for times in loop.steps] == ["device", "host", "device", "device"]
    assert "device events failed" in loop.steps[1].reasons["forward"]


def test_a_device_far_behind_is_given_up_step_by_step_in_bounded_memory():
    loop = Loop()
    for _ in range(100):
        loop.span("forward", ask_ms=0.1, work_ms=1000)
        loop.step.end()
    assert len(loop.step.device.waiting) == device_timeline.MAX_STEPS_BEHIND
    assert len(loop.steps) == 100 - device_timeline.MAX_STEPS_BEHIND
    assert "behind the host" in loop.steps[0].reasons["forward"]


def test_events_are_used_again():
    loop = Loop()
    made = []
    new_event = loop.step.device.new_event
    loop.step.device.new_event = lambda: made.append(1) or new_event()
    for _ in range(200):
        loop.span("forward", ask_ms=2, work_ms=2)
        loop.span("backward", ask_ms=2, work_ms=2)
        loop.step.end()
    assert len(made) <= 20


def test_a_step_with_too_many_borders_gives_up_its_device_times_and_the_next_has_them_again(monkeypatch):
    monkeypatch.setattr(device_timeline, "MAX_MARKS_PER_STEP", 10)
    loop = Loop()
    for spans in (20, 2, 2, 2):
        for _ in range(spans):
            loop.span("forward", ask_ms=2, work_ms=2)
        loop.step.end()
    loop.step.close()
    assert [times.timeline for times in loop.steps] == ["host", "device", "device", "device"]
    assert "more than 10 borders" in loop.steps[0].reasons["forward"]
    assert loop.steps[1].phases_ns["forward"] == pytest.approx(4 * MS, abs=2)


work = st.tuples(
    st.sampled_from(["data", "forward", "backward", "optimizer", "communication", None]),
    st.integers(0, 20),
    st.integers(0, 40),
)


@given(st.lists(st.lists(work, min_size=1, max_size=6), min_size=3, max_size=5))
def test_the_phases_sum_to_the_devices_step_and_the_steps_to_the_devices_run(steps):
    loop = Loop()
    start_ms = loop.device.host_ms()
    for works in steps:
        for name, ask_ms, work_ms in works:
            if name is None:
                loop.device.launch(work_ms)
                loop.clock.advance(ms=ask_ms)
            else:
                loop.span(name, ask_ms=ask_ms, work_ms=work_ms)
        loop.clock.advance(ms=1)
        loop.step.end()
    end_ms = max(loop.device.free_at_ms, loop.device.host_ms())
    loop.step.close()
    assert len(loop.steps) == len(steps)
    for times in loop.steps:
        known = [value for value in times.phases_ns.values() if value is not None]
        assert sum(known) == (times.step_ns or 0)
        assert min(known, default=0) >= 0
    assert sum(times.step_ns or 0 for times in loop.steps) == pytest.approx((end_ms - start_ms) * MS, abs=100)
