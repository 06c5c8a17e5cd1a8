"""The signals that stop a worker, and the event that a signal handler may set."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from django_pglock.worker.supervising.channel import SignalSafeEvent, stop_signals
from tests.conftest import NEVER


@pytest.fixture
def event():
    """Return an event that the handler of SIGUSR1 sets."""
    event = SignalSafeEvent()
    before = signal.signal(signal.SIGUSR1, lambda *_: event.set())
    yield event
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_ends_the_wait_of_the_thread_that_it_interrupts(event):
    sender = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGUSR1])
    sender.start()
    assert event.wait(NEVER)
    sender.join()


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_hang_up_stops_a_worker_unless_nohup_has_it_ignored(handler):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert (signal.SIGHUP in stop_signals()) is (handler is signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
