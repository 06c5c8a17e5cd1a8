"""TaskTimeout is raised while the function runs, and never after it: thousands of functions end at their deadline."""

from __future__ import annotations

import gc
import sys
import threading
import time

import pytest

from django_pglock.errors import TaskTimeout
from django_pglock.worker.running.stoppable import StoppableAttempt
from django_pglock.worker.running.task_thread import TaskThread
from django_pglock.worker.running.watchdog import Watchdog
from tests.conftest import NEVER


class Call(StoppableAttempt):
    """An attempt that executes Python code for a number of seconds. A long one gives the processor to other threads."""

    def __init__(self, seconds, timeout=None):
        self.claim = self
        self.seconds = seconds
        self.timeout = timeout

    is_cancelled = False

    def log_fields(self):
        return {}

    def call(self):
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            if self.seconds > 0.1:
                time.sleep(0.001)
        return "returned"


@pytest.fixture
def watchdog():
    watchdog = Watchdog()
    yield watchdog
    watchdog.stop()
    assert watchdog.wait(60)


@pytest.fixture
def quick_switches():
    """Let threads take turns at as many lines as possible.

    Without the garbage of other tests: Python swallows an exception that strikes in the callback of a weak reference.
    """
    before = sys.getswitchinterval()
    gc.collect()
    gc.disable()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
    gc.enable()


@pytest.mark.parametrize("is_traced", [False, True])
def test_nothing_is_raised_after_the_function_has_returned(watchdog, in_threads, quick_switches, is_traced):
    """Also no trace function is left that would keep a traced thread at one line forever, as in Python 3.11."""
    timeout = 0.0005
    # Tracing takes time, whether for the timeout or for coverage.
    turns = 80 if is_traced or sys.gettrace() else 400
    enough = turns // 8

    def work(number):
        if is_traced:
            sys.settrace(lambda *_: None)
        thread = watchdog.watch_this_thread()
        ends = {"returned": 0, "struck": 0}
        # On a slow machine most exceptions come too late. Then each round gives more functions more time.
        for turn in range(10 * turns):
            if turn >= turns and ends["struck"] > enough and (is_traced or ends["returned"] > enough):
                break
            spread = min(1.0, 0.1 * (1 + turn // turns))
            call = Call(timeout * (1 + spread * (turn % 20 / 10 - 1)), timeout)
            try:
                ends[thread.call(call)] += 1
            except TaskTimeout:
                ends["struck"] += 1
            assert call.is_over
            # A late exception would be raised here at the latest, and fail the test.
            for _ in range(200):
                pass
        return ends

    ends = in_threads(work, 4)
    assert min(each["struck"] for each in ends) > enough, "the deadlines were never met"
    assert is_traced or min(each["returned"] for each in ends) > enough, "all were too late"


def test_a_timeout_of_zero_ends_the_function_at_once(watchdog, in_threads, quick_switches):
    """The exception may come at any line from the first on, and the thread is usable afterwards."""

    def work(number):
        thread = watchdog.watch_this_thread()
        struck = 0
        for turn in range(200):
            # Every second function may return before its timeout; the others run until the timeout is raised.
            try:
                thread.call(Call(0.005 if turn % 2 else NEVER, timeout=0.0))
            except TaskTimeout:
                struck += 1
            assert thread.call(Call(0)) == "returned"
        return struck

    assert min(in_threads(work, 4)) >= 100


def test_the_thread_waits_until_no_stop_is_pending(watchdog, monkeypatch, in_threads):
    """A cancel that has already been sent would cancel the statement of the next task."""
    arrived, returned, order = threading.Event(), threading.Event(), []

    def cancel_slowly(thread, attempt):
        arrived.set()
        assert returned.wait(60)
        time.sleep(0.1)
        order.append("strike")
        return True

    monkeypatch.setattr(TaskThread, "_cancel_statements", cancel_slowly)
    call = Call(0, timeout=0.01)

    def wait_and_return():
        assert arrived.wait(60)
        returned.set()

    call.call = wait_and_return
    watchdog.watch_this_thread().call(call)
    order.append("next task")
    assert order == ["strike", "next task"]


def test_a_timeout_at_the_very_end_leaves_the_thread_in_order(watchdog, monkeypatch):
    thread, call = watchdog.watch_this_thread(), Call(0)
    looks = iter([TaskTimeout(), False, False])

    class Stopping:
        def locked(self):
            if isinstance(look := next(looks), TaskTimeout):
                raise look
            return look

    monkeypatch.setattr(thread, "_stopping", Stopping())
    assert thread.call(call) == "returned", "it was done by then"
    assert call.is_over
    assert thread.attempt is None
    assert thread.call(Call(0)) == "returned"


def test_no_thread_runs_while_nothing_has_a_timeout(watchdog):
    assert watchdog.watch_this_thread().call(Call(0)) == "returned"
    assert watchdog._thread is None


def test_a_deadline_that_comes_sooner_than_the_one_it_waits_for_is_met(watchdog, in_threads):
    def work(number):
        thread = watchdog.watch_this_thread()
        time.sleep(number * 0.1)
        began = time.monotonic()
        with pytest.raises(TaskTimeout):
            thread.call(Call(20, timeout=0.2 if number else 5.0))
        return time.monotonic() - began

    long, short = in_threads(work, 2)
    assert 0.2 <= short < 4.5, "it was met with the other one"
    assert 5.0 <= long < 20


def test_a_function_that_cannot_be_stopped_is_reported_once(watchdog, monkeypatch, caplog, eventually):
    monkeypatch.setattr("django_pglock.worker.running.task_thread.OVERRUN", 0.1)
    monkeypatch.setattr("django_pglock.worker.running.task_thread.BETWEEN_STOPS", 0.05)
    call = Call(0, timeout=0.05)
    blocked = threading.Lock()
    blocked.acquire()
    call.call = lambda: blocked.acquire(timeout=60)

    def release():
        eventually(lambda: "cannot be stopped" in caplog.text)
        time.sleep(0.3)  # for more attempts to stop the function, which are not reported
        blocked.release()

    threading.Thread(target=release, daemon=True).start()
    with pytest.raises(TaskTimeout):
        watchdog.watch_this_thread().call(call)
    assert caplog.text.count("cannot be stopped") == 1
