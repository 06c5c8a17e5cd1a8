"""The error of a wait that times out contains the reason why the task is not finished."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connections
from django.db.models.functions import Now
from django.utils.translation import override

from django_pglock.models import Queue, Task
from django_pglock.models import Worker as WorkerRow
from django_pglock.tasks.compat import task_backends
from django_pglock.worker.queues import Queues
from tests.db.store.workers import register
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)

ECHO = "tests.sample.tasks.echo"


def enter(*paths, queues=()):
    register(worker := uuid4(), queues=[*queues], task_paths=paths)
    return WorkerRow.objects.filter(pk=worker)


def why(result):
    return task_backends["default"].why_unfinished(int(result.id))


def test_why_unfinished_names_the_reason_why_no_worker_runs_a_task():
    result = tasks.echo.enqueue(1)
    begin = "it is READY in the queue 'default'"
    assert why(result) == f"{begin}. No worker is running. Start one: python manage.py runlockworker"
    enter("other.path")
    unknown = "No worker knows this task. Do the workers import its module, and do they run the new version?"
    assert why(result) == f"{begin}. {unknown}"
    silent = enter(ECHO)
    silent.update(heartbeat_at=Now() - timedelta(days=1))
    assert unknown in why(result)
    enter(ECHO)
    assert why(result) == begin
    Queue.objects.pause("default")
    paused = "No worker runs this task, because the queue default is paused. Resume the queue"
    assert why(result) == f"{begin}. {paused}"
    with override("de"):
        assert why(result) == f"{begin}. {paused}", "as all other errors"


@pytest.mark.parametrize(
    ("asked", "serves"),
    [
        (["mail"], False),
        (["mail", "def*"], True),
        (["default=3", "mail"], True),
        (["--exclude mail"], True),
        (["--exclude def*"], False),
        (["*", "--exclude default"], False),
    ],
)
def test_why_unfinished_says_that_no_worker_serves_the_queue(asked, serves):
    """The queues in the row of a worker are parsed as the worker parses its command line."""
    enter(ECHO, queues=asked)
    enter("other.path")
    said = "No worker that knows this task serves the queue default. Start a worker that serves this queue"
    assert (said in why(tasks.echo.enqueue(1))) is not serves
    words = [each.removeprefix("--exclude ") for each in asked if each.startswith("--exclude ")]
    names = [each.removesuffix("=3") for each in asked if not each.startswith("--")]
    assert Queues(names, exclude=words).serves("default") is serves


def test_why_unfinished_of_a_running_task_gives_only_its_status():
    result = tasks.echo.enqueue(1)
    Task.objects.update(status="RUNNING", worker=uuid4(), last_attempted_at=Now(), attempts=1)
    assert why(result) == "it is RUNNING in the queue 'default'"


def test_the_timeout_error_of_a_wait_contains_the_reason():
    result = tasks.echo.enqueue(1)
    said = rf"Task {result.id} has not finished within 0\.01 s: it is READY in the queue 'default'\. No worker is"
    with pytest.raises(TimeoutError, match=said):
        result.wait(0.01)

    async def wait():
        try:
            await result.await_(0.01)
        finally:
            await sync_to_async(connections.close_all)()

    with pytest.raises(TimeoutError, match=said):
        asyncio.run(wait())


def test_a_wait_raises_a_timeout_error_also_if_the_reason_cannot_be_read(monkeypatch):
    def refuse(*args):
        raise OperationalError

    result = tasks.echo.enqueue(1)
    monkeypatch.setattr("django_pglock.store.why_it_waits.run", refuse)
    with pytest.raises(TimeoutError, match=rf"^Task {result.id} has not finished within 0\.01 s\.$"):
        result.wait(0.01)


def test_why_unfinished_says_when_a_scheduled_task_is_due():
    result = tasks.echo.using(run_after=datetime(2124, 2, 29, 12, 30, tzinfo=timezone.utc)).enqueue(1)
    enter(ECHO)
    assert why(result) == "it is SCHEDULED in the queue 'default' and due at 2124-02-29 12:30:00+00:00"
    WorkerRow.objects.all().delete()
    assert "12:30:00+00:00. No worker is running." in why(result)
