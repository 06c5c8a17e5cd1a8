"""Waiting for a result, and enqueueing when the data is there."""

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
from django.db.models.functions import Now
from django.test import TestCase
from django.test.utils import CaptureQueriesContext, override_settings

from django_pglock import enqueue_many
from django_pglock.checks import check_task_database
from django_pglock.errors import TaskArgumentsError, TaskError
from django_pglock.models import Task, Waiter
from django_pglock.store import result_listener
from django_pglock.store.release import release
from django_pglock.store.wait import ended, note_waits
from django_pglock.tasks.compat import task_backends
from tests.conftest import NEVER
from tests.proxy import Proxy
from tests.sample import forking_tasks, tasks

pytestmark = pytest.mark.django_db(transaction=True)


def sessions():
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'django_pglock wait'")
        return cursor.fetchone()[0]


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_the_end_is_heard_of(worker, eventually):
    """With a poll every ten minutes nothing but the notification can tell."""
    worker()
    result = tasks.note_and_sleep.enqueue("x", 0.3)
    assert result.wait(60).is_finished
    assert tasks.echo.enqueue(5).wait(60).return_value == 5
    eventually(lambda: not Waiter.objects.exists())
    eventually(lambda: sessions() == 0)


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
@pytest.mark.parametrize("ending", ["failure", "atomic", "cancel"])
def test_every_ending_is_an_end(worker, eventually, ending):
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


def test_it_ends_when_its_time_is_over(eventually):
    result = tasks.echo.enqueue(1)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=f"Task {result.id} has not finished within 0.2 s"):
        result.wait(0.2)
    assert time.monotonic() - began >= 0.2
    eventually(lambda: not Waiter.objects.exists())


def test_inside_a_transaction_it_would_wait_for_ever():
    with transaction.atomic():
        result = tasks.echo.enqueue(1)
        with pytest.raises(TaskError, match="before the commit"):
            result.wait()


class InsideTestCase(TestCase):
    """Its transaction does not count for code under test, but hides the task from every worker."""

    async def test_so_would_a_coroutine(self):
        result = await tasks.echo.aenqueue(1)
        with self.assertRaisesRegex(TaskError, "TransactionTestCase"):
            await result.await_(10)

    def test_it_would_wait_for_ever(self):
        with self.assertRaisesRegex(TaskError, "TransactionTestCase"):
            tasks.echo.enqueue(1).wait(60)


def test_in_a_coroutine_and_called_off(worker, eventually):
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


def results_of(count):
    """Return results of as many tasks that are due in an hour."""
    first = tasks.echo.using(run_after=timedelta(hours=1)).enqueue(1)
    others = enqueue_many(tasks.echo.using(run_after=timedelta(hours=1)), range(count - 1))
    return [first, *(replace(first, id=id_) for id_ in others)]


def settle(*results):
    """Let these tasks succeed as a worker would."""
    ids = [int(result.id) for result in results]
    Task.objects.filter(pk__in=ids).update(status="SUCCESSFUL", finished_at=Now())
    release("default", ids)


def run(coroutine):
    async def then_close():
        try:
            return await coroutine
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(then_close())


async def until(function):
    """Wait until a function of the database returns something true."""
    deadline = time.monotonic() + NEVER
    while time.monotonic() < deadline:
        if await sync_to_async(function)():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{function} never came true")


def listener_threads():
    return [thread for thread in threading.enumerate() if thread.name == "django_pglock wait"]


@pytest.fixture
def nothing_is_left(eventually):
    yield
    eventually(lambda: sessions() == 0, why="a session is left")
    eventually(lambda: not Waiter.objects.exists(), why="rows are left")
    eventually(lambda: not listener_threads(), why="a thread is left")
    assert not result_listener._listeners


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_beside_a_thousand_that_wait_one_is_answered(worker, nothing_is_left):
    """Half of them wait for one task. They hold one thread, one session, and one row a task."""
    worker()
    results = results_of(500)
    results += [replace(results[0]) for _ in range(500)]
    threads = threading.active_count()

    async def work():
        waiting = [asyncio.ensure_future(result.await_()) for result in results]
        await until(lambda: Waiter.objects.count() == 500)
        quick = await tasks.echo.aenqueue(7)
        assert (await quick.await_(60)).return_value == 7
        # A thread for Django's async queries, the listener's, and its timer.
        assert threading.active_count() <= threads + 3
        assert await sync_to_async(sessions)() == 1
        await sync_to_async(settle)(*results)
        assert all(result.is_finished for result in await asyncio.gather(*waiting))

    run(work())


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_threads_share_the_session_as_well(in_threads, nothing_is_left, eventually):
    results = results_of(30)

    def work(number):
        if number < 30:
            return results[number].wait(60).is_finished
        eventually(lambda: Waiter.objects.count() == 30)
        shared = sessions()
        settle(*results)
        return shared

    assert in_threads(work, 31) == [True] * 30 + [1]


def test_what_a_thousand_wait_for_is_looked_up_by_one_statement():
    ids = [int(result.id) for result in results_of(1000)]
    with CaptureQueriesContext(connection) as queries:
        assert ended("default", [*ids, 10**15]) == [(10**15, False)]
        noted = note_waits("default", ids, instead_of=[])
        assert sorted(noted) == sorted(ids)
        assert note_waits("default", [], instead_of=list(noted.values())) == {}
    assert len(queries) == 3
    assert not Waiter.objects.exists()


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_one_that_is_cancelled_leaves_the_others_waiting(nothing_is_left):
    first, second = results_of(2)

    async def work():
        waiting = [asyncio.ensure_future(each.await_()) for each in (first, replace(first), second, replace(second))]
        await until(lambda: Waiter.objects.count() == 2)
        for each in (waiting[0], waiting[2], waiting[3]):
            each.cancel()
        await until(lambda: list(Waiter.objects.values_list("awaited", flat=True)) == [int(first.id)])
        await sync_to_async(settle)(first, second)
        assert (await waiting[1]).is_finished
        assert all(each.cancelled() for each in (waiting[0], waiting[2], waiting[3]))

    run(work())


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_cancels_at_any_moment_leave_nothing(nothing_is_left):
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
def test_a_loop_that_is_closed_under_its_waiters_disturbs_nobody(in_threads, nothing_is_left, eventually, caplog):
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


def test_whoever_was_abandoned_is_forgotten_at_the_next_poll(nothing_is_left, eventually, settings):
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 0.2}
    [result] = results_of(1)
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(result.await_())
    loop.run_until_complete(until(Waiter.objects.exists))
    loop.run_until_complete(sync_to_async(connections.close_all)())
    loop.close()
    eventually(lambda: not listener_threads(), why="the listener goes on for nobody")
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


TERMINATE = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'django_pglock wait'
"""


@pytest.mark.parametrize("before", [True, False])
@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_a_lost_session_is_made_anew_and_nothing_is_missed(
    in_threads, nothing_is_left, eventually, before, monkeypatch
):
    """What ended while nobody listened is seen by the look of the new session; what ends then is heard by it."""
    monkeypatch.setattr(result_listener, "FIRST_PAUSE", 0.5)
    results = results_of(5)

    def work(number):
        if number < 5:
            return results[number].wait(60).is_finished
        eventually(lambda: Waiter.objects.count() == 5)
        with connection.cursor() as cursor:
            cursor.execute(TERMINATE)
            assert cursor.fetchone() == (1,)
        if before:
            settle(*results)
        else:
            eventually(lambda: sessions() == 0)
            eventually(lambda: sessions() == 1)
            time.sleep(0.3)
            assert Waiter.objects.count() == 5
            settle(*results)
        return True

    assert in_threads(work, 6) == [True] * 6


def test_a_server_that_is_away_is_told_to_those_who_come_and_kept_from_those_who_wait(
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
        # Until the loss is noticed, whoever comes waits for another session as well.
        eventually(lambda: "is lost" in caplog.text)
        with pytest.raises(OperationalError, match="nobody is there"):
            second.wait(60)
        settle(first)
        is_away.clear()
        return True

    assert in_threads(work, 2) == [True, True]


def test_an_outage_that_does_not_end_is_told_to_all(in_threads, eventually, monkeypatch):
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


def test_a_mistake_of_ours_is_told_and_keeps_nobody_waiting(monkeypatch, eventually, caplog):
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
    monkeypatch.setattr(result_listener, "PATIENCE", 1.0)
    [result] = results_of(1)
    with Proxy.before(connection) as proxy:
        monkeypatch.setitem(connections.settings["default"], "HOST", "127.0.0.1")
        monkeypatch.setitem(connections.settings["default"], "PORT", str(proxy.port))

        def work(number):
            if number:
                return result.wait(60).is_finished
            eventually(lambda: Waiter.objects.exists() and sessions())
            proxy.black_hole(new=False)
            # This thread's own session is as mute as the listener's.
            connections.close_all()
            settle(result)
            return True

        assert in_threads(work, 2) == [True, True]
        proxy.pass_through()


@pytest.mark.parametrize("count", [1, 50])
def test_where_no_notification_arrives_one_look_serves_all(in_threads, eventually, monkeypatch, settings, count):
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


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
def test_one_that_is_retried_before_anybody_has_looked_is_waited_for_again(in_threads, eventually, monkeypatch):
    [result] = results_of(1)
    refresh, count = type(result).refresh, []

    def retry_first(self):
        count.append(1)
        if len(count) == 1:
            assert Task.objects.retry() == 1
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


def test_on_commit_means_after_the_commit_and_never_after_a_rollback():
    with transaction.atomic():
        tasks.echo.enqueue_on_commit(1)
        assert not Task.objects.exists()
    assert Task.objects.get().args == [1]
    with transaction.atomic():
        tasks.echo.enqueue_on_commit(2)
        transaction.set_rollback(True)
    tasks.echo.enqueue_on_commit(3)
    assert [row.args for row in Task.objects.order_by("id")] == [[1], [3]]


def test_arguments_are_checked_while_they_can_be_mended():
    with transaction.atomic(), pytest.raises(TaskArgumentsError):
        tasks.echo.enqueue_on_commit(object())


def test_meta_travels_with_the_task():
    tasks.echo.using(meta={"trace": "abc"}).enqueue(1)
    assert Task.objects.get().meta == {"trace": "abc"}


def test_a_check_tells_of_tasks_in_another_database(settings):
    assert check_task_database() == []
    backend = {**settings.TASKS["default"], "OPTIONS": {"database": "elsewhere"}}
    settings.TASKS = {"default": backend}
    assert [each.id for each in check_task_database()] == ["django_pglock.W009"]
    assert task_backends
