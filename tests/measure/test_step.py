"""The breakdown of a step on the host's clock: parts that sum, and nothing that can stop a training."""

import logging
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.measure.phases import PHASES
from headrace.measure.step import SPANS, Step

from .fakes import MS, FakeClock


class Recorded:
    """A step on a fake clock that keeps what it delivers."""

    def __init__(self, **options):
        self.clock = FakeClock()
        self.steps, self.payloads = [], []
        self.step = Step(clock=self.clock, sink=self.take, **options)

    def take(self, times, payload):
        self.steps.append(times)
        self.payloads.append(payload)

    def span(self, name, ms):
        with getattr(self.step, name):
            self.clock.advance(ms=ms)


def total(times):
    return sum(value for value in times.phases_ns.values() if value is not None)


def test_a_step_is_the_sum_of_its_parts_and_the_rest_is_named():
    run = Recorded()
    for name, ms in [("data", 5), ("forward", 20), ("backward", 40), ("optimizer", 8), ("post", 1)]:
        run.span(name, ms)
    run.clock.advance(ms=3)
    run.step.end("payload")
    (times,) = run.steps
    assert run.payloads == ["payload"]
    assert times.step_ns == 77 * MS
    assert times.phases_ns == {
        "data": 5 * MS,
        "forward": 20 * MS,
        "backward": 40 * MS,
        "optimizer": 8 * MS,
        "post": 1 * MS,
        "communication": None,
        "scheduling": None,
        "other": 3 * MS,
    }
    assert set(times.reasons) == {"communication", "scheduling"}
    assert all(times.reasons.values())


def test_what_was_not_bracketed_is_none_with_a_reason_and_what_was_watched_is_zero():
    run = Recorded()
    run.step.observe("communication")
    run.span("forward", 1)
    run.step.end()
    (times,) = run.steps
    assert times.phases_ns["communication"] == 0
    assert times.phases_ns["backward"] is None
    assert "no span" in times.reasons["backward"]
    assert "no device queue" in times.reasons["scheduling"]


def test_a_phase_that_cannot_be_seen_stays_none_even_with_spans_and_its_time_is_in_other():
    run = Recorded(unseen={"communication": "issued below Python"})
    with run.step.backward:
        run.clock.advance(ms=4)
        run.span("communication", 2)
    run.step.end()
    (times,) = run.steps
    assert times.phases_ns["communication"] is None
    assert times.reasons["communication"] == "issued below Python"
    assert times.phases_ns["other"] == 2 * MS
    assert total(times) == times.step_ns


def test_nested_spans_get_their_own_time_only():
    """An optimizer with a closure runs forward and backward inside its step."""
    run = Recorded()
    with run.step.optimizer:
        run.clock.advance(ms=1)
        run.span("forward", 10)
        with run.step.backward:
            run.clock.advance(ms=20)
            run.span("communication", 5)
        run.clock.advance(ms=2)
    run.step.end()
    phases = run.steps[0].phases_ns
    assert (phases["optimizer"], phases["forward"], phases["backward"], phases["communication"]) == (
        3 * MS,
        10 * MS,
        20 * MS,
        5 * MS,
    )


def test_the_parts_of_data_loading_belong_to_data():
    run = Recorded()
    with run.step.data:
        run.clock.advance(ms=1)
        for part, ms in [("storage", 2), ("cpu_work", 3), ("copy", 4), ("hand_out", 5)]:
            run.span(part, ms)
    run.step.end()
    (times,) = run.steps
    assert times.phases_ns["data"] == 15 * MS
    assert times.data_parts_ns == {
        "data/storage": 2 * MS,
        "data/cpu": 3 * MS,
        "data/copy": 4 * MS,
        "data/handout": 5 * MS,
    }


def test_gradient_accumulation_adds_up_and_is_one_step():
    run = Recorded()
    for _ in range(4):
        run.span("forward", 2)
        run.span("backward", 4)
    run.span("optimizer", 1)
    run.step.end()
    (times,) = run.steps
    assert (times.phases_ns["forward"], times.phases_ns["backward"], times.step_ns) == (8 * MS, 16 * MS, 25 * MS)


def test_evaluation_and_checkpoints_are_taken_out_with_everything_inside_them():
    run = Recorded()
    run.span("forward", 10)
    with run.step.evaluation:
        run.span("forward", 100)  # a hooked model does not know that it is evaluated
        with run.step.checkpoint, run.step.evaluation:
            run.clock.advance(ms=30)
        run.span("forward", 20)
    with run.step.checkpoint:
        run.clock.advance(ms=7)
    run.span("backward", 5)
    run.step.end()
    (times,) = run.steps
    assert times.step_ns == 15 * MS
    assert times.phases_ns["forward"] == 10 * MS
    assert times.excluded_ns == {"evaluation": 150 * MS, "checkpoint": 7 * MS}
    assert times.notes == ()


def test_waiting_for_a_batch_is_data_and_the_loops_own_work_is_not():
    run = Recorded()

    def source():
        run.clock.advance(ms=9)  # before the first batch, such as starting workers
        for batch in range(3):
            run.clock.advance(ms=5)
            yield batch

    batches = []
    for batch in run.step.batches(source()):
        batches.append(batch)
        run.clock.advance(ms=70)
        run.step.end()
    assert batches == [0, 1, 2]
    assert [times.phases_ns["data"] for times in run.steps] == [14 * MS, 5 * MS, 5 * MS]
    assert [times.phases_ns["other"] for times in run.steps] == [70 * MS] * 3


def test_a_batch_source_that_raises_raises_through_and_closes_its_span():
    run = Recorded()

    def source():
        run.clock.advance(ms=5)
        raise OSError("disk")
        yield

    with pytest.raises(OSError, match="disk"):
        list(run.step.batches(source()))
    run.step.end()
    assert run.steps[0].phases_ns["data"] == 5 * MS


def test_an_exception_in_training_passes_and_the_span_is_closed():
    run = Recorded()

    def forward():
        with run.step.forward:
            run.clock.advance(ms=3)
            raise FloatingPointError("overflow")

    with pytest.raises(FloatingPointError):
        forward()
    run.clock.advance(ms=1)
    run.step.end()
    assert run.steps[0].phases_ns["forward"] == 3 * MS
    assert run.steps[0].phases_ns["other"] == 1 * MS


def test_a_span_left_open_is_none_with_its_reason_not_a_wrong_number():
    run = Recorded()
    run.step.forward.__enter__()
    run.clock.advance(ms=3)
    run.step.end()
    run.clock.advance(ms=2)
    run.step.forward.__exit__(None, None, None)
    run.step.end()
    first, second = run.steps
    assert first.phases_ns["forward"] is None
    assert "still open" in first.reasons["forward"]
    assert first.phases_ns["other"] == first.step_ns == 3 * MS
    assert second.phases_ns["other"] == 2 * MS
    assert any("was not open" in note for note in second.notes)


def test_an_evaluation_left_open_does_not_silence_the_rest_of_the_run():
    run = Recorded()
    run.span("forward", 1)
    run.step.evaluation.__enter__()
    run.clock.advance(ms=3)
    run.step.end()
    run.span("forward", 2)
    run.step.end()
    assert run.steps[1].phases_ns["forward"] == 2 * MS
    assert any("still open" in note for note in run.steps[0].notes)


def test_crossed_spans_spoil_both_and_nothing_else():
    run = Recorded()
    run.span("data", 1)
    run.step.forward.__enter__()
    run.step.backward.__enter__()
    run.clock.advance(ms=5)
    run.step.forward.__exit__(None, None, None)
    run.clock.advance(ms=2)
    run.step.backward.__exit__(None, None, None)
    run.span("optimizer", 1)
    run.step.end()
    (times,) = run.steps
    assert times.phases_ns["forward"] is None
    assert times.phases_ns["backward"] is None
    assert "crossed" in times.reasons["forward"]
    assert (times.phases_ns["data"], times.phases_ns["optimizer"]) == (MS, MS)
    assert total(times) == times.step_ns == 9 * MS


def test_spans_from_other_threads_are_left_out_and_counted():
    run = Recorded()
    run.span("forward", 1)
    thread = threading.Thread(target=lambda: (run.span("backward", 0), run.step.end("not mine")))
    thread.start()
    thread.join()
    run.step.end("mine")
    assert run.payloads == ["mine"]
    assert run.steps[0].phases_ns["backward"] is None
    assert any("other threads" in note for note in run.steps[0].notes)
    assert any("another thread" in note for note in run.steps[0].notes)


def test_the_loop_may_run_in_another_thread_than_the_one_that_set_it_up():
    run = Recorded()
    thread = threading.Thread(target=lambda: (run.span("forward", 2), run.step.end()))
    thread.start()
    thread.join()
    assert run.steps[0].phases_ns["forward"] == 2 * MS


@pytest.mark.parametrize("backwards_ms", [0, -5])
def test_a_clock_that_stands_still_or_runs_backwards_gives_no_time(backwards_ms):
    run = Recorded()
    run.span("forward", backwards_ms)
    run.step.end()
    (times,) = run.steps
    assert times.step_ns is None
    assert set(times.phases_ns.values()) == {None}
    assert "did not move forward" in times.reasons["forward"]


def test_a_failure_inside_ends_measuring_and_not_training(caplog):
    run = Recorded()

    def broken():
        raise OSError("no clock")

    run.step.clock = broken
    with caplog.at_level(logging.WARNING, "headrace.measure"):
        for _ in range(3):
            with run.step.forward:
                pass
            run.step.end()
    assert run.step.failure == "OSError: no clock"
    assert run.steps == []
    assert len(caplog.records) == 1


def test_a_receiver_that_raises_is_dropped_and_the_loop_goes_on(caplog):
    calls = []

    def sink(times, payload):
        calls.append(times)
        raise OSError("disk full")

    step = Step(clock=FakeClock(), sink=sink)
    with caplog.at_level(logging.WARNING, "headrace.measure"):
        step.end()
        step.end()
    assert len(calls) == 1
    assert step.failure is None
    assert step.index == 2


@pytest.mark.parametrize(
    ("deliver_every", "delivered"),
    [(1, list(range(1, 41))), (10, [10, 20, 30, 40]), (16, [16, 32]), (100, [16, 32]), (20, [16, 20, 36, 40])],
)
def test_steps_are_handed_on_in_groups_of_bounded_size_at_their_borders(deliver_every, delivered):
    run = Recorded(deliver_every=deliver_every)
    seen = []
    for number in range(1, 41):
        run.span("forward", number)
        run.step.end(number)
        if len(run.steps) > (seen[-1] if seen else 0):
            seen.append(len(run.steps))
    assert seen == delivered
    run.step.close()
    assert run.payloads == list(range(1, 41))
    assert [times.phases_ns["forward"] for times in run.steps] == [number * MS for number in range(1, 41)]


def test_steps_that_wait_keep_what_was_known_when_they_ended():
    run = Recorded(deliver_every=10)
    run.step.end()
    run.step.observe("communication")
    run.step.spoil("forward", "crossed")
    run.span("forward", 1)
    run.step.end()
    run.step.end()
    run.step.close()
    assert [times.phases_ns["communication"] for times in run.steps] == [None, 0, None]
    assert [times.reasons["forward"] == "crossed" for times in run.steps] == [False, True, False]


def test_steps_that_ended_before_a_failure_are_not_lost_with_it(caplog):
    run = Recorded(deliver_every=10)
    run.span("forward", 1)
    run.step.end()
    run.step.clock = None
    with caplog.at_level(logging.WARNING, "headrace.measure"):
        run.step.end()
    run.step.close()
    assert [times.index for times in run.steps] == [0]


def test_begin_forgets_what_was_before():
    run = Recorded()
    run.step.forward.__enter__()
    run.clock.advance(ms=100)
    run.step.begin()
    run.span("forward", 1)
    run.step.end()
    assert run.steps[0].step_ns == MS


def test_after_close_spans_cost_nothing_and_book_nothing():
    run = Recorded()
    run.step.close()
    run.span("forward", 1)
    run.step.end()
    assert run.steps == []
    run.step.close()


def test_nothing_grows_with_the_length_of_the_run():
    run = Recorded()
    run.step.sink = None
    for _ in range(1000):
        run.span("forward", 1)
        run.step.end()
    assert len(run.step.open_slots) == len(run.step.notes) == 0
    assert len(run.step.totals_ns) == len(run.step.counts)


actions = st.recursive(
    st.tuples(st.sampled_from(sorted(SPANS)), st.integers(0, 50)),
    lambda inner: st.tuples(st.sampled_from(sorted(SPANS)), st.lists(inner, max_size=3)),
    max_leaves=8,
)


@given(st.lists(st.lists(actions, max_size=4), min_size=1, max_size=3))
def test_whatever_is_nested_the_phases_sum_to_the_step_and_no_moment_is_lost(steps):
    run = Recorded()
    start = run.clock.now_ns

    def play(action):
        name, what = action
        with getattr(run.step, name):
            if isinstance(what, int):
                run.clock.advance(ms=what)
            else:
                run.clock.advance(ms=1)
                for inner in what:
                    play(inner)

    for actions_of_step in steps:
        for action in actions_of_step:
            play(action)
        run.clock.advance(ms=1)
        run.step.end()
    spent = run.clock.now_ns - start
    assert sum(times.step_ns + sum(times.excluded_ns.values()) for times in run.steps) == spent
    for times in run.steps:
        assert set(times.phases_ns) == set(PHASES)
        assert total(times) == times.step_ns
        assert all(value is None or value >= 0 for value in times.phases_ns.values())
        assert all((times.phases_ns[name] is None) == (name in times.reasons) for name in PHASES)
