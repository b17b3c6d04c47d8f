"""Ctrl-C reaches every process of a terminal; the readers of a bench leave it to the one that prints."""

from __future__ import annotations

import os
import signal

import pytest

from headrace.bench.handover_actors import Reader
from headrace.bench.handover_charges import ReaderCharge

pytestmark = pytest.mark.usefixtures("watchdog", "nothing_left")


def test_a_reader_does_not_hear_an_interrupt() -> None:
    reader = Reader(ReaderCharge(contender="clock"))
    try:
        os.kill(reader.pid, signal.SIGINT)  # also before its interpreter is up
        assert reader.answer() == "up"
        os.kill(reader.pid, signal.SIGINT)
        reader.command("ready", 2, 0.0)
        assert len(reader.answer()) == 2
    finally:
        reader.close()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
