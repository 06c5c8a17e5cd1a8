"""The watchdog stops each attempt at its deadline, whatever else is watched, and nothing is stopped after its end."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace

import pytest

from django_pglock.errors import TaskStopped, TaskTimeout
from django_pglock.worker.channel import new_loop
from django_pglock.worker.child.attempt import Attempt
from django_pglock.worker.child.runners import TaskThread, Watchdog
from tests.conftest import NEVER


class Call(Attempt):
    """An attempt that checks for a number of seconds whether it must stop."""

    def __init__(self, seconds, timeout=None):
        self.claim = SimpleNamespace(id=1, attempt=1, is_cancelled=False)
        self.seconds = seconds
        self.timeout = timeout

    def run(self, thread):
        self.runner = thread
        with self:
            self.begin()
            return self.function()

    def function(self):
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            self.check()
            time.sleep(0.001)
        return "returned"


@pytest.fixture
def watchdog():
    """A watchdog that is called by a loop in another thread, as the main thread of a child calls it."""
    loop = new_loop()

    def watch():
        if (due_in := watchdog.check()) < math.inf:
            loop.call_later(due_in, watch)

    watchdog = Watchdog(changed=lambda: loop.call_soon_threadsafe(watch))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield watchdog
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    assert not thread.is_alive()
    loop.close()


def test_no_stop_is_pending_when_the_next_task_begins(watchdog, monkeypatch):
    """A cancel that has already been sent would cancel the statement of the next task."""
    arrived, returned, order = threading.Event(), threading.Event(), []

    def cancel_slowly(thread, attempt):
        arrived.set()
        assert returned.wait(60)
        time.sleep(0.1)
        order.append("stop")

    monkeypatch.setattr(TaskThread, "_cancel_statements", cancel_slowly)
    call = Call(0, timeout=0.01)

    def wait_and_return():
        assert arrived.wait(60)
        returned.set()

    call.function = wait_and_return
    thread = watchdog.watch_this_thread()
    with pytest.raises(TaskTimeout):
        call.run(thread)
    order.append("next task")
    assert order == ["stop", "next task"]
    thread.stop(call)
    assert order == ["stop", "next task"], "it has ended"


def test_a_deadline_that_comes_sooner_than_the_one_it_waits_for_is_met(watchdog, in_threads):
    def work(number):
        thread, call = watchdog.watch_this_thread(), Call(NEVER, timeout=0.2 if number else 5.0)
        time.sleep(number * 0.1)
        stopped = threading.Event()
        thread.stop = lambda attempt: stopped.set()
        call.function = lambda: stopped.wait(NEVER)
        began = time.monotonic()
        with pytest.raises(TaskTimeout):
            call.run(thread)
        return time.monotonic() - began

    long, short = in_threads(work, 2)
    assert 0.2 <= short < 4.5, "it was met with the other one"
    assert 5.0 <= long < 20
    assert not watchdog.running()


def test_a_database_that_does_not_answer_a_cancel_delays_no_other_stop(watchdog, in_threads):
    answers = threading.Event()

    def work(number):
        thread, call = watchdog.watch_this_thread(), Call(NEVER, timeout=0.3 if number else 0.05)
        call.function = lambda: answers.wait(NEVER)
        # The first one answers only when the second one is stopped.
        thread._cancel_statements = lambda attempt: answers.set() if number else answers.wait(NEVER)
        with pytest.raises(TaskTimeout):
            call.run(thread)
        return answers.is_set()

    assert in_threads(work, 2) == [True, True]


def test_threads_that_end_at_their_deadlines_run_the_next_task(watchdog, in_threads):
    def work(number):
        thread, ends = watchdog.watch_this_thread(), {"returned": 0, "stopped": 0}
        for turn in range(200):
            try:
                ends[Call(0.002 * (turn % 3), timeout=0.002).run(thread)] += 1
            except TaskTimeout:
                ends["stopped"] += 1
            assert Call(0).run(thread) == "returned"
        return ends

    for ends in in_threads(work, 4):
        assert min(ends.values()) > 0


def test_an_attempt_that_does_not_leave_is_reported_once(watchdog, monkeypatch, eventually):
    monkeypatch.setattr("django_pglock.worker.child.runners.BETWEEN_STOPS", 0.02)
    watchdog.grace_period, reported, stops = 0.1, [], []
    watchdog.long_overdue = reported.append
    call, thread = Call(0, timeout=0.05), watchdog.watch_this_thread()
    thread.stop = stops.append
    call.function = lambda: eventually(lambda: reported and len(stops) > 20)
    with pytest.raises(TaskTimeout):
        call.run(thread)
    assert reported == [call]


def test_what_a_function_has_raised_is_replaced_by_the_reason_to_stop(watchdog):
    call = Call(NEVER, timeout=0.01)
    with pytest.raises(TaskTimeout, match=r"timeout of 0\.01 s") as raised:
        call.run(watchdog.watch_this_thread())
    assert type(raised.value.__context__) is TaskStopped
