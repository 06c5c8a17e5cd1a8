"""Waiting for a result, and enqueueing when the data is there."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction
from django.test import TestCase
from django.test.utils import override_settings

from django_pglock.checks import check_task_database
from django_pglock.errors import TaskArgumentsError, TaskError
from django_pglock.models import Task, Waiter
from django_pglock.tasks.compat import task_backends
from tests.sample import tasks

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
    assert result.wait(20).is_finished
    assert tasks.echo.enqueue(5).wait(20).return_value == 5
    assert not Waiter.objects.exists()
    eventually(lambda: sessions() == 0)


@override_settings(DJANGO_PGLOCK={"POLL_INTERVAL": 600})
@pytest.mark.parametrize("ending", ["failure", "atomic", "cancel"])
def test_every_ending_is_an_end(worker, eventually, ending):
    if ending == "cancel":
        result = tasks.echo.enqueue(1)
        thread = threading.Thread(target=cancel_what_is_awaited, args=(eventually,))
        thread.start()
        assert result.wait(20).status.value == "FAILED"
        thread.join()
        return
    worker()
    task, args = {"failure": (tasks.fail, ()), "atomic": (tasks.record_slowly, ("x", 0.2))}[ending]
    assert task.enqueue(*args).wait(20).is_finished


def cancel_what_is_awaited(eventually):
    try:
        eventually(Waiter.objects.exists)
        Task.objects.all().cancel()
    finally:
        connection.close()


def test_it_ends_when_its_time_is_over():
    result = tasks.echo.enqueue(1)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=f"Task {result.id} has not finished within 0.2 s"):
        result.wait(0.2)
    assert 0.2 <= time.monotonic() - began < 5
    assert not Waiter.objects.exists()


def test_inside_a_transaction_it_would_wait_for_ever():
    with transaction.atomic():
        result = tasks.echo.enqueue(1)
        with pytest.raises(TaskError, match="before the commit"):
            result.wait()


class InsideTestCase(TestCase):
    """Its transaction does not count for code under test, but hides the task from every worker."""

    def test_it_would_wait_for_ever(self):
        with self.assertRaisesRegex(TaskError, "TransactionTestCase"):
            tasks.echo.enqueue(1).wait(10)


def test_in_a_coroutine_and_called_off(worker, eventually):
    worker()

    async def work():
        result = await tasks.echo.aenqueue(7)
        assert (await result.await_(20)).return_value == 7
        never = await tasks.echo.using(run_after=timedelta(hours=1)).aenqueue(1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(never.await_(), 0.2)
        await sync_to_async(connections.close_all)()

    asyncio.run(work())
    eventually(lambda: sessions() == 0, why="the wait goes on although nobody wants it any more")


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
