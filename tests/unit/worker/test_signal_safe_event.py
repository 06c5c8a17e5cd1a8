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


def test_all_waiting_threads_are_woken(in_threads, event):
    sender = threading.Timer(0.1, event.set)
    sender.start()
    assert in_threads(lambda _: event.wait(NEVER), 4) == [True] * 4
    sender.join()


def test_without_a_set_the_wait_ends_by_its_timeout():
    event = SignalSafeEvent()
    assert not event.wait(0.01)
    assert not event.is_set()


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_hang_up_stops_a_worker_unless_nohup_has_it_ignored(handler):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert (signal.SIGHUP in stop_signals()) is (handler is signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)
