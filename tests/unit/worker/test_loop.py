"""The loop: sockets, timers, and calls from other threads and signal handlers."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest

from django_pglock.worker import loop as module
from django_pglock.worker.loop import READ, WRITE, Loop
from tests.conftest import NEVER


@pytest.fixture
def loop(monkeypatch):
    """A loop that nothing but an event wakes."""
    monkeypatch.setattr(module, "LONGEST_WAIT", NEVER)
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_timers_are_called_in_the_order_of_their_times(loop):
    called = []
    for seconds in (0.03, 0.01, 0.02):
        loop.call_later(seconds, lambda seconds=seconds: called.append(seconds))
    loop.call_later(0.015, lambda: called.append("cancelled")).cancel()
    loop.call_later(0.04, loop.stop)
    loop.run()
    assert called == [0.01, 0.02, 0.03]


def test_a_cancelled_timer_does_not_wake_the_loop(loop):
    loop.call_later(0.0, loop.stop).cancel()
    loop.call_later(NEVER, loop.stop)
    assert loop._wait_for() > 1


def test_a_call_of_another_thread_wakes_the_loop(loop):
    threading.Timer(0.05, loop.call_soon, [loop.stop]).start()
    loop.run()


def test_a_signal_wakes_the_loop(loop):
    """Its handler runs only when the thread is back in Python code, so the wait must end before."""
    before = signal.signal(signal.SIGUSR1, lambda *_: loop.call_soon(loop.stop))
    signal.set_wakeup_fd(loop.wakeup_fd, warn_on_full_buffer=False)
    try:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1]).start()
        loop.run()
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, before)


def test_any_number_of_wake_ups_between_two_turns_is_kept_without_waiting(loop):
    called = []
    for number in range(100_000):
        loop.call_soon(lambda number=number: called.append(number))
    loop.call_soon(loop.stop)
    loop.run()
    assert called == list(range(100_000))


def test_an_error_of_a_call_ends_neither_the_loop_nor_the_other_calls(loop, pair, caplog):
    ours, theirs = pair
    loop.watch(ours, READ, lambda: 1 / 0)
    loop.call_later(0.0, lambda: 1 / 0)
    loop.call_soon(lambda: 1 / 0)
    theirs.send(b"x")
    loop.run_once()
    assert caplog.text.count("The worker met an error, and continues.") == 3


def test_a_socket_that_an_earlier_call_of_the_same_turn_has_closed_is_not_read(loop):
    """Both are ready. The first call closes the other one, as the end of a child does with its channel."""
    called, sockets = [], dict(enumerate(socket.socketpair()))

    def read(number):
        called.append(number)
        other = sockets[1 - number]
        loop.unwatch(other)
        other.close()

    for number, each in sockets.items():
        each.send(b"x")
        loop.watch(each, READ, lambda number=number: read(number))
    loop.run_once()
    loop.run_once()
    assert called in ([0, 0], [1, 1])
    sockets[called[0]].close()


def test_a_second_watch_replaces_the_first(loop, pair):
    called = []
    loop.watch(pair[0], READ, lambda: called.append("read"))
    loop.watch(pair[0], WRITE, lambda: called.append("write"))
    loop.run_once()
    loop.unwatch(pair[0])
    loop.unwatch(pair[0])
    loop.call_soon(loop.stop)
    loop.run()
    assert called == ["write"]
