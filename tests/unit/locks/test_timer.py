"""Delayed calls in one thread."""

from __future__ import annotations

import threading

from django_pglock.locks.timer import TimerThread
from tests.conftest import NEVER


def test_calls_run_in_the_order_of_their_times_and_not_if_they_are_cancelled():
    calls, is_over, timers = [], threading.Event(), TimerThread()
    timers.add(0.2, is_over.set)
    timers.add(0.1, calls.append, "second")
    cancelled = timers.add(0.05, calls.append, "cancelled")
    timers.add(0.0, calls.append, "first")
    cancelled.cancel()
    assert is_over.wait(NEVER)
    assert calls == ["first", "second"]
    assert cancelled.is_cancelled


def test_a_call_that_raises_does_not_stop_later_calls(caplog):
    """It runs code of others: handlers of the log, receivers of signals. Later calls free the locks of others."""
    is_over, timers = threading.Event(), TimerThread()
    timers.add(0.0, int, "no number")
    timers.add(0.05, is_over.set)
    assert is_over.wait(NEVER), "the thread has ended"
    assert "ValueError" in caplog.text
