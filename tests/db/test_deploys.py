"""Old code meets new rows, and new code meets old rows. What cannot be right fails aloud and keeps the data."""

from __future__ import annotations

import pytest

from django_pglock import task
from django_pglock.models import AdvisoryLock, Attempt, Task
from django_pglock.tasks import registry
from django_pglock.worker import Worker

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

calls = []


@pytest.fixture(autouse=True)
def _no_calls():
    calls.clear()


def deploy(function, **options):
    """Make a function the present version of the task function ``send`` of this module."""
    function.__module__, function.__qualname__ = __name__, "send"
    registry._definitions.pop(f"{__name__}.send", None)
    return task(**options)(function)


def run():
    """Run a worker until no task is left to run. Returns the status of each task."""
    Worker(threads=1, drain=True).run()
    return list(Task.objects.order_by("id").values_list("status", flat=True))


def one(order, text="none"):
    calls.append((order, text))


def several(calls_of_group):
    calls.append(calls_of_group)


def test_a_group_that_is_added_refuses_waiting_calls_with_positional_arguments():
    """Their names are not known any more. The tasks keep them, and run when a user retries them with the old code."""
    deploy(one, max_attempts=3).enqueue(7, "first")
    deploy(several, group="{order}", max_attempts=3)
    assert run() == ["FAILED"]
    assert calls == []
    [attempt] = Attempt.objects.all()
    assert attempt.exception_path == "django_pglock.errors.TaskArgumentsError"
    assert "has a group, so its calls take only keyword arguments" in attempt.traceback
    deploy(one)
    assert Task.objects.all().retry() == 1
    assert run() == ["SUCCESSFUL"]
    assert calls == [(7, "first")]


def test_a_group_that_is_added_gets_waiting_calls_with_keyword_arguments():
    deploy(one).enqueue(order=7, text="first")
    deploy(several, group="{order}").enqueue(order=7, text="second")
    assert run() == ["SUCCESSFUL"] * 2
    assert calls == [[{"order": 7, "text": "first"}], [{"order": 7, "text": "second"}]]


def test_a_group_call_leaves_out_waiting_calls_with_positional_arguments():
    """As of a program that writes rows. The others of the group run."""
    send = deploy(several, group="{order}")
    for text in ("first", "second", "third"):
        send.enqueue(order=7, text=text)
    Task.objects.filter(kwargs__text="second").update(args=[7, "second"], kwargs={})
    assert run() == ["SUCCESSFUL", "FAILED", "SUCCESSFUL"]
    assert calls == [[{"order": 7, "text": "first"}, {"order": 7, "text": "third"}]]


def test_a_group_that_is_removed_calls_the_function_for_each_waiting_task():
    send = deploy(several, group="{order}")
    for text in ("first", "second"):
        send.enqueue(order=7, text=text)
    deploy(one)
    assert run() == ["SUCCESSFUL"] * 2
    assert calls == [(7, "first"), (7, "second")]


def test_a_function_that_became_async_runs_no_call_that_asks_for_a_transaction():
    deploy(one).using(atomic=True, max_attempts=3).enqueue(7)

    async def one_async(order):
        calls.append(order)

    deploy(one_async)
    assert run() == ["FAILED"]
    assert calls == []
    [attempt] = Attempt.objects.all()
    assert attempt.exception_path == "django_pglock.errors.TaskOptionError"


def test_an_advisory_lock_that_is_added_holds_for_waiting_tasks():
    """They have no lock key. Its name is that of their arguments."""

    def look(order):
        calls.append([each.name for each in AdvisoryLock.objects.all() if "order" in each.name])

    deploy(look).enqueue(7)
    deploy(look, lock="order:{order}", advisory=True).enqueue(7)
    assert run() == ["SUCCESSFUL"] * 2
    assert calls == [["order:7"]] * 2
