"""The one session of a process that is notified of awaited ends: shared by all waiters, replaced when it is lost."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import replace

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection, connections
from django.test.utils import override_settings

from django_pglock.conf import get_settings
from django_pglock.models import Waiter
from django_pglock.store import result_listener
from django_pglock.store.release import ended
from django_pglock.store.result_listener import FIRST_PAUSE, LONGEST_PAUSE, ResultListener, WaitingCaller
from tests.conftest import NEVER
from tests.db.store.waiting import listener_threads, results_of, run, sessions, settle, until
from tests.proxy import Proxy
from tests.sample import forking_tasks, tasks

pytestmark = pytest.mark.django_db(transaction=True)


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_a_result_is_delivered_while_a_thousand_coroutines_wait_for_others(worker, nothing_is_left):
    """Most of the waiters wait for one task. All of them need one thread, one session, and one row for each task."""
    worker()
    results = results_of(200)
    results += [replace(results[0]) for _ in range(800)]
    threads = threading.active_count()

    async def work():
        waiting = [asyncio.ensure_future(result.await_()) for result in results]
        await until(lambda: Waiter.objects.count() == 200)
        quick = await tasks.echo.aenqueue(7)
        assert (await quick.await_(60)).return_value == 7
        # A thread for Django's async queries, the listener's, and its timer.
        assert threading.active_count() <= threads + 3
        assert [thread.daemon for thread in listener_threads()] == [True]
        assert await sync_to_async(sessions)() == 1
        await sync_to_async(settle)(*results)
        assert all(result.is_finished for result in await asyncio.gather(*waiting))

    run(work())


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_threads_that_wait_for_results_share_one_session(in_threads, nothing_is_left, eventually):
    results = results_of(30)

    def work(number):
        if number < 30:
            return results[number].wait(60).is_finished
        eventually(lambda: Waiter.objects.count() == 30)
        shared = sessions(), len(listener_threads())
        settle(*results)
        return shared

    assert in_threads(work, 31) == [True] * 30 + [(1, 1)]


def test_an_abandoned_waiter_is_removed_at_the_next_poll(nothing_is_left, eventually, settings):
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 0.2}
    [result] = results_of(1)
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(result.await_())
    loop.run_until_complete(until(Waiter.objects.exists))
    loop.run_until_complete(sync_to_async(connections.close_all)())
    loop.close()
    eventually(lambda: not listener_threads(), why="the listener continues for nobody")
    waiting.get_coro().close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_a_forked_child_waits_by_a_session_of_its_own(in_threads, nothing_is_left, eventually):
    first, second = results_of(2)

    def work(number):
        if number:
            return first.wait(60).is_finished
        eventually(Waiter.objects.exists)
        child = forking_tasks.fork()
        if not child:
            try:
                second.wait(60)
                os._exit(0)
            finally:
                os._exit(1)
        eventually(lambda: sessions() == 2)
        eventually(lambda: Waiter.objects.count() == 2)
        settle(second)
        _, status = os.waitpid(child, 0)
        settle(first)
        return os.waitstatus_to_exitcode(status)

    assert in_threads(work, 2) == [0, True]


LISTENS = "FROM pg_stat_activity WHERE application_name = 'django_pglock wait'"
TERMINATE = f"SELECT pid, pg_terminate_backend(pid) {LISTENS}"


def pids():
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT pid {LISTENS}")
        return [pid for (pid,) in cursor.fetchall()]


@pytest.mark.parametrize("before", [True, False])
@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_a_result_listener_replaces_a_lost_session_and_misses_no_result(
    in_threads, nothing_is_left, eventually, before, monkeypatch
):
    """The first poll of the new session finds tasks that ended meanwhile. It is notified of later ends."""
    monkeypatch.setattr(result_listener, "FIRST_PAUSE", 0.5)
    results = results_of(5)

    def work(number):
        if number < 5:
            return results[number].wait(NEVER).is_finished
        eventually(lambda: Waiter.objects.count() == 5)
        with connection.cursor() as cursor:
            cursor.execute(TERMINATE)
            [(ended, _)] = cursor.fetchall()
        if before:
            settle(*results)
        else:
            eventually(lambda: ended not in (there := pids()) and len(there) == 1)
            time.sleep(0.3)
            assert Waiter.objects.count() == 5
            settle(*results)
        return True

    assert in_threads(work, 6) == [True] * 6


def test_an_unreachable_server_is_an_error_for_new_waiters_and_not_for_present_ones(
    in_threads, eventually, monkeypatch, nothing_is_left, caplog
):
    first, second = results_of(2)
    is_away = threading.Event()
    connect = result_listener.dedicated_connection

    def refuse(*args, **kwargs):
        if is_away.is_set():
            raise OperationalError("nobody is there")
        return connect(*args, **kwargs)

    monkeypatch.setattr(result_listener, "dedicated_connection", refuse)

    def work(number):
        if number:
            return first.wait(60).is_finished
        eventually(Waiter.objects.exists)
        is_away.set()
        with connection.cursor() as cursor:
            cursor.execute(TERMINATE)
        # Until the loss is noticed, new callers wait for another session as well.
        eventually(lambda: "is lost" in caplog.text)
        with pytest.raises(OperationalError, match="nobody is there"):
            second.wait(60)
        settle(first)
        is_away.clear()
        return True

    assert in_threads(work, 2) == [True, True]


def test_a_long_outage_raises_an_error_in_all_waits_for_results(in_threads, eventually, monkeypatch):
    [result] = results_of(1)
    monkeypatch.setattr(result_listener, "LONGEST_OUTAGE", 0.3)

    def refuse(*args, **kwargs):
        raise OperationalError("nobody is there")

    def work(number):
        if number:
            with pytest.raises(OperationalError, match="nobody is there"):
                result.wait()
            return
        eventually(Waiter.objects.exists)
        monkeypatch.setattr(result_listener, "dedicated_connection", refuse)
        with connection.cursor() as cursor:
            cursor.execute(TERMINATE)

    in_threads(work, 2)
    eventually(lambda: not listener_threads())


@pytest.fixture
def listener():
    """A listener whose thread has not been started."""
    listener = ResultListener("default")
    yield listener
    listener._wake_sender.close()
    listener._wake_receiver.close()


def test_the_error_of_the_listener_is_told_to_those_who_have_just_come(listener):
    told, error = [], RuntimeError()
    listener.join(WaitingCaller(1, told.append, is_abandoned=lambda: False))
    listener._give_up(error)
    assert told == [error]


def test_pauses_between_two_sessions_become_longer_up_to_a_limit(listener, monkeypatch):
    pauses = []
    monkeypatch.setattr(listener, "_sleep", pauses.append)
    listener._waiting = {1: {WaitingCaller(1, lambda answer: None, is_abandoned=lambda: False)}}
    listener._before_loss = {1}
    for _ in range(12):
        listener._lose(OperationalError())
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE


def test_a_pass_without_an_error_ends_an_outage(listener, in_threads, monkeypatch):
    """Otherwise callers that come in a later outage would wait for its end, as if they had waited before it."""
    options = connections.settings["default"]["OPTIONS"]
    monkeypatch.setitem(options, "options", f"{options.get('options', '')} -c idle_session_timeout=1h")
    result, has_ended = results_of(2)
    told, sleeps = [], []
    monkeypatch.setattr(listener, "_sleep", lambda seconds, *_: sleeps.append(seconds))

    def join(result):
        listener.join(WaitingCaller(int(result.id), told.append, is_abandoned=lambda: False))

    def work(_):
        join(result)
        listener._lost_at, listener._failures, listener._before_loss, listener._stale = 1.0, 3, {1}, [1]
        listener._run_once()
        left = listener._lost_at, listener._failures, listener._before_loss, listener._stale
        with listener._connection.cursor() as cursor:
            cursor.execute("SHOW idle_session_timeout")
            limit = cursor.fetchone()
        settle(has_ended)
        join(has_ended)
        listener._poll_at = NEVER + time.monotonic()
        listener._run_once()
        assert told == [True], "a task that had ended before is found without a poll"
        listener._notified = [has_ended.id]
        listener._run_once()
        assert len(sleeps) == 2, "no sleep before a notification that is there already"
        settle(result)
        while len(told) < 2:
            listener._run_once()
        rows = dict(listener._row_ids)
        listener._close()
        return left, limit, rows, listener._waiting

    assert in_threads(work, 1) == [((None, 0, set(), []), ("0",), {}, {})]
    assert told == [True, True]
    assert 0 < sleeps[0] <= get_settings().POLL_INTERVAL < sleeps[1]


def test_a_sleep_ends_with_a_wake_and_not_before(listener):
    waker = threading.Timer(0.05, listener._wake)
    waker.start()
    listener._sleep(NEVER)
    waker.join(NEVER)
    with pytest.raises(BlockingIOError):
        listener._wake_receiver.recv(1)


def test_the_time_limit_of_a_pass_ends_with_the_pass():
    before = threading.enumerate()
    with result_listener._limited(connection):
        [timer] = set(threading.enumerate()).difference(before)
        assert timer.daemon, "the process may end meanwhile"
        assert not timer.finished.is_set()
    assert timer.finished.is_set()


def test_an_error_in_the_listener_is_logged_and_ends_all_waits(monkeypatch, eventually, caplog):
    [result] = results_of(1)
    monkeypatch.setattr(result_listener.ResultListener, "_tell_ended", lambda self, new: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        result.wait()
    eventually(lambda: not listener_threads())
    assert not result_listener._listeners
    assert "has failed" in caplog.text


def test_a_session_that_never_answers_is_given_up(in_threads, eventually, monkeypatch, settings, nothing_is_left):
    """Half open: the network takes what is sent, and no answer ever comes."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 0.5}
    monkeypatch.setattr(result_listener, "STATEMENT_TIMEOUT", 1.0)
    [result] = results_of(1)
    with Proxy.before(connection) as proxy:
        monkeypatch.setitem(connections.settings["default"], "HOST", "127.0.0.1")
        monkeypatch.setitem(connections.settings["default"], "PORT", str(proxy.port))

        def work(number):
            if number:
                return result.wait(60).is_finished
            eventually(lambda: Waiter.objects.exists() and sessions())
            proxy.black_hole(new=False)
            # The session of this thread is half open, too.
            connections.close_all()
            settle(result)
            return True

        assert in_threads(work, 2) == [True, True]
        proxy.pass_through()


@pytest.mark.parametrize("count", [1, 20])
def test_without_notifications_one_poll_finds_the_results_of_all_waiters(
    in_threads, eventually, monkeypatch, settings, count
):
    """As behind a pooler in transaction mode."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 0.3}
    monkeypatch.setattr(result_listener, "DONE_CHANNEL", "somewhere_else")
    results, looks = results_of(count), []
    monkeypatch.setattr(result_listener, "ended", lambda using, ids: looks.append(len(ids)) or ended(using, ids))

    def work(number):
        if number < count:
            return results[number].wait(60).is_finished
        eventually(lambda: Waiter.objects.count() == count)
        eventually(lambda: looks.count(count) >= 2)
        settle(*results)

    assert in_threads(work, count + 1) == [*[True] * count, None]
