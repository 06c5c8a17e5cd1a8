"""Waiting for a result, in threads and in coroutines."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection, connections, transaction
from django.test import TestCase
from django.test.utils import override_settings

from django_pglock.errors import TaskError
from django_pglock.models import Task, Waiter
from django_pglock.store import await_end
from django_pglock.store.release import ended
from tests.conftest import NEVER
from tests.db.store.waiting import listener_threads, results_of, run, sessions, settle, until
from tests.proxy import Proxy
from tests.sample import forking_tasks, running_tasks, tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_the_waiter_is_notified_of_the_end(worker, eventually):
    """The poll comes every ten minutes, so only the notification can end the wait."""
    worker()
    result = tasks.note_and_sleep.enqueue("x", 0.3)
    assert result.wait(60).is_finished
    assert tasks.echo.enqueue(5).wait(60).return_value == 5
    eventually(lambda: not Waiter.objects.exists())
    eventually(lambda: sessions() == 0)


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
@pytest.mark.parametrize("ending", ["failure", "atomic", "cancel"])
def test_a_wait_for_a_result_ends_with_each_kind_of_outcome(worker, eventually, ending):
    if ending == "cancel":
        result = tasks.echo.enqueue(1)
        thread = threading.Thread(target=cancel_what_is_awaited, args=(eventually,))
        thread.start()
        assert result.wait(60).status.value == "FAILED"
        thread.join()
        return
    worker()
    task, args = {"failure": (tasks.fail, ()), "atomic": (tasks.record_slowly, ("x", 0.2))}[ending]
    assert task.enqueue(*args).wait(60).is_finished


def cancel_what_is_awaited(eventually):
    try:
        eventually(Waiter.objects.exists)
        Task.objects.all().cancel()
    finally:
        connection.close()


def test_a_wait_for_a_result_ends_at_its_timeout(eventually):
    result = tasks.echo.enqueue(1)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=f"Task {result.id} has not finished within 0.2 s"):
        result.wait(0.2)
    assert time.monotonic() - began >= 0.2
    eventually(lambda: not Waiter.objects.exists())


def test_a_wait_for_an_uncommitted_task_is_refused():
    with transaction.atomic():
        result = tasks.echo.enqueue(1)
        with pytest.raises(TaskError, match="before the commit"):
            result.wait()


class InsideTestCase(TestCase):
    """The transaction of the test case does not count for the code under test, but hides the task from each worker."""

    async def test_an_async_wait_for_a_result_in_a_test_case_is_refused(self):
        result = await tasks.echo.aenqueue(1)
        with self.assertRaisesRegex(TaskError, "run_tasks"):
            await result.await_(10)

    def test_a_wait_for_a_result_in_a_test_case_is_refused(self):
        with self.assertRaisesRegex(TaskError, "run_tasks"):
            tasks.echo.enqueue(1).wait(60)


def test_a_coroutine_waits_for_a_result_and_its_cancel_ends_the_wait(worker, eventually):
    worker()

    async def work():
        result = await tasks.echo.aenqueue(7)
        assert (await result.await_(60)).return_value == 7
        never = await tasks.echo.using(run_after=timedelta(hours=1)).aenqueue(1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(never.await_(), 0.2)
        await sync_to_async(connections.close_all)()

    asyncio.run(work())
    eventually(lambda: sessions() == 0, why="the wait goes on although nobody wants it any more")


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_waits_for_results_cancelled_at_any_moment_leave_no_waiter(nothing_is_left):
    results = results_of(20)

    async def work():
        for pause in [0, 0, 0.001, 0.002, 0.005, 0.01, 0.02] * 3:
            waiting = [asyncio.ensure_future(replace(result).await_()) for result in results]
            await asyncio.sleep(pause)
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    run(work())


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_a_loop_that_is_closed_with_waiters_does_not_disturb_others(in_threads, nothing_is_left, eventually, caplog):
    first, second = results_of(2)

    def work(number):
        if number:
            return second.wait(60).is_finished
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(first.await_())
        loop.run_until_complete(until(lambda: Waiter.objects.count() == 2))
        loop.run_until_complete(sync_to_async(connections.close_all)())
        loop.close()
        settle(first)
        settle(second)
        return waiting

    waiting, is_finished = in_threads(work, 2)
    assert is_finished
    assert not [record for record in caplog.records if record.name.startswith("django_pglock")]
    waiting.get_coro().close()
    del waiting


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_the_wait_continues_if_the_task_is_retried_before_its_end_is_read(in_threads, eventually, monkeypatch):
    [result] = results_of(1)
    refresh, count = type(result).refresh, []

    def retry_first(self):
        if not count:
            assert Task.objects.retry() == 1
        count.append(1)
        refresh(self)

    monkeypatch.setattr(type(result), "refresh", retry_first)

    def work(number):
        if number:
            return result.wait(60).status.value
        eventually(Waiter.objects.exists)
        Task.objects.cancel()
        eventually(lambda: len(count) == 1 and Waiter.objects.exists())
        settle(result)

    assert in_threads(work, 2) == [None, "SUCCESSFUL"]


@pytest.mark.parametrize("function", [running_tasks.wait_for_other, running_tasks.await_other])
def test_a_task_that_waits_for_another_says_so(worker, eventually, function):
    """Otherwise such tasks in all threads wait forever for tasks that cannot begin, and nothing says why."""
    worker(threads=1, grace=0)
    refused = function.enqueue()
    eventually(lambda: refused.refresh() or refused.is_finished)
    [error] = refused.errors
    assert error.exception_class is TaskError
    assert f"({function.module_path}) attempt 1 of 1 waits for task " in error.traceback
    assert "Call context.gather()" in error.traceback
    assert "using(after=result)" in error.traceback


# The one session of a process that is notified of awaited ends: shared by all waiters, replaced when it is lost.


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
    return [pid for (pid,) in execute_sql(f"SELECT pid {LISTENS}")]


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
        [(ended, _)] = execute_sql(TERMINATE)
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
        execute_sql(TERMINATE)

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
