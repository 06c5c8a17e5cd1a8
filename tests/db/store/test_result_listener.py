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

from django_pglock.models import Waiter
from django_pglock.store import await_end
from django_pglock.store.release import ended
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
    before = set(threading.enumerate())

    async def work():
        waiting = [asyncio.ensure_future(result.await_()) for result in results]
        await until(lambda: Waiter.objects.count() == 200)
        quick = await tasks.echo.aenqueue(7)
        assert (await quick.await_(60)).return_value == 7
        # A thread for Django's async queries, the listener's, and its timer. The worker may start its own meanwhile.
        added = [thread.name for thread in set(threading.enumerate()) - before]
        assert len([name for name in added if not name.startswith("lockworker-")]) <= 3
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
    monkeypatch.setattr(await_end, "pause_after", lambda failures: 0.5)
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


def test_a_long_outage_raises_an_error_in_all_waits_for_results(in_threads, eventually, monkeypatch):
    [result] = results_of(1)
    monkeypatch.setattr(await_end, "LONGEST_OUTAGE", 0.3)

    def refuse(*args, **kwargs):
        raise OperationalError("nobody is there")

    def work(number):
        if number:
            with pytest.raises(OperationalError, match="nobody is there"):
                result.wait()
            return
        eventually(Waiter.objects.exists)
        monkeypatch.setattr(await_end, "dedicated_connection", refuse)
        with connection.cursor() as cursor:
            cursor.execute(TERMINATE)

    in_threads(work, 2)
    eventually(lambda: not listener_threads())


def test_a_session_that_never_answers_is_given_up(in_threads, eventually, monkeypatch, settings, nothing_is_left):
    """Half open: the network takes what is sent, and no answer ever comes."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 0.5}
    monkeypatch.setattr(await_end, "STATEMENT_TIMEOUT", 1.0)
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
    monkeypatch.setattr(await_end, "DONE_CHANNEL", "somewhere_else")
    results, looks = results_of(count), []
    monkeypatch.setattr(await_end, "ended", lambda using, ids: looks.append(len(ids)) or ended(using, ids))

    def work(number):
        if number < count:
            return results[number].wait(60).is_finished
        eventually(lambda: Waiter.objects.count() == count)
        eventually(lambda: looks.count(count) >= 2)
        settle(*results)

    assert in_threads(work, count + 1) == [*[True] * count, None]
