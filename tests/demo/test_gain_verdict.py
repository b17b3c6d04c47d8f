"""What the demo may say of the throughput, from block times alone."""

from __future__ import annotations

import pytest

from headrace.demo.document import throughput_gain

# Ten blocks of a step of 100 ms, give or take 1 %.
STEADY_MS = [99.0, 101.0, 100.0, 100.5, 99.5, 100.2, 99.8, 100.1, 99.9, 100.0]


def gain(headrace_ms: list[float], possible: float | None, num_steps: int = 32) -> dict[str, object]:
    feeds = {"broadcast": {"step_ms": {"blocks": STEADY_MS}}, "headrace": {"step_ms": {"blocks": headrace_ms}}}
    return throughput_gain(feeds, possible_gain=possible, num_steps=num_steps)


def test_a_gain_that_a_perfect_feed_could_give_is_one() -> None:
    found = gain([ms * 0.90 for ms in STEADY_MS], possible=0.12)
    assert found["value"] == pytest.approx(1 / 0.90 - 1)
    assert (found["verdict"], found["reason"]) == ("better", None)


def test_more_than_a_perfect_feed_could_give_is_the_machine_s_doing() -> None:
    found = gain([ms * 0.80 for ms in STEADY_MS], possible=0.0377)
    assert found["verdict"] == "cannot tell"
    assert "more than a perfect feed could give" in str(found["reason"])


def test_a_loss_is_said_whatever_was_possible() -> None:
    assert gain([ms * 1.2 for ms in STEADY_MS], possible=0.03)["verdict"] == "worse"


def test_a_run_of_one_step_has_neither_interval_nor_verdict() -> None:
    found = gain([ms * 1.2 for ms in STEADY_MS], possible=0.03, num_steps=1)
    assert (found["low"], found["high"], found["verdict"], found["reason"]) == (None, None, "cannot tell", "one step")
    assert found["value"] == pytest.approx(1 / 1.2 - 1)
