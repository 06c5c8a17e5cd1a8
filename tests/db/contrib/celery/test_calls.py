"""Calls of tasks with Celery's names: what becomes a row, what the function gets, and what the caller gets."""

from __future__ import annotations

import asyncio
import threading
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from time import sleep
from uuid import UUID

import pytest
from django.core.exceptions import SynchronousOnlyOperation, ValidationError
from django.db import transaction
from django.test import override_settings

from django_pglock.contrib.celery import AsyncResult, SoftTimeLimitExceeded, Task, current_task, shared_task
from django_pglock.errors import TaskArgumentsError, TaskOptionError
from django_pglock.models import Schedule
from django_pglock.models import Task as Row
from django_pglock.tasks import registry
from django_pglock.testing import run_tasks

pytestmark = pytest.mark.django_db
VALUES = [
    datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone.utc),
    datetime(2026, 1, 2, 3, 4),
    date(2026, 1, 2),
    time(3, 4, 5),
    Decimal("1.20"),
    UUID(int=7),
    b"text",
    b"\xff",
    {"rows": [Decimal(1), {"at": date(2026, 1, 2)}]},
]


@shared_task
def add(x, y=0):
    return x + y


@shared_task(
    queue="mail", priority=5, time_limit=60, soft_time_limit=30, rate_limit="10/m", expires=3600, acks_late=True
)
def with_options():
    return None


@shared_task(name="an.own.name")
def echo(value, **more):
    return value


@shared_task(bind=True)
def about_itself(self, *args, **kwargs):
    request = self.request
    return [request.id, request.retries, request.args, request.kwargs, request.is_eager, request.called_directly]


@shared_task(ignore_result=True)
def object_without_json():
    return object()


def test_delay_writes_a_row_with_the_path_and_the_arguments_of_the_function():
    result = add.delay(1, y=2)
    row = Row.objects.get()
    assert (row.task_path, row.args, row.kwargs) == (f"{__name__}.add", [1], {"y": 2})
    assert (row.queue, row.max_retries, row.meta) == ("default", 3, {})
    assert result.id == f"00000000-0000-0000-0000-{row.pk:012d}"
    assert (result.state, result.ready()) == ("PENDING", False)
    run_tasks()
    assert (result.state, result.get(), result.successful()) == ("SUCCESS", 3, True)


def test_a_direct_call_runs_the_function_here():
    assert add(1, 2) == 3
    assert about_itself(5) == [None, 0, (5,), {}, False, True]
    assert not Row.objects.exists()


def test_options_are_those_of_the_package():
    with_options.delay()
    row = Row.objects.get()
    definition = with_options.definition
    assert (row.queue, row.priority) == ("mail", 5)
    assert (definition.timeout, definition.expires, definition.rate.count, definition.rate.per) == (30, 3600, 10, 60)


def test_options_of_a_call_go_before_those_of_the_task():
    before = datetime.now(timezone.utc)
    add.apply_async((1,), {"y": 2}, countdown=60, queue="slow", priority=9, time_limit=7)
    add.apply_async((1,), eta=datetime(2060, 1, 1))
    waiting, dated = Row.objects.order_by("id")
    assert (waiting.queue, waiting.priority, waiting.meta["options"]) == ("slow", 9, {"timeout": 7})
    assert before + timedelta(seconds=50) < waiting.run_after < before + timedelta(seconds=90)
    assert dated.run_after == datetime(2060, 1, 1, tzinfo=timezone.utc)


def test_expired_tasks_are_revoked():
    result = add.apply_async((1,), expires=datetime(2020, 1, 1, tzinfo=timezone.utc))
    run_tasks()
    assert result.state == "REVOKED"


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_arguments_and_results_have_the_types_of_kombu(value):
    result = echo.delay(value, other=value)
    run_tasks(raise_errors=True)
    assert result.get() == value
    assert type(result.get()) is type(value)


@pytest.mark.parametrize("value", [object(), {1, 2}, Row()])
def test_other_types_are_refused_at_the_call(value):
    with pytest.raises(TaskArgumentsError, match=r"An argument of an.own.name cannot be written as JSON.*primary key"):
        echo.delay(value)
    assert not Row.objects.exists()


def test_a_call_that_the_function_does_not_take_is_refused_as_in_celery():
    with pytest.raises(TypeError, match="add cannot be called like this: missing a required argument: 'x'"):
        add.delay()


def test_a_bound_function_knows_its_request():
    result = about_itself.delay(1, b=2)
    run_tasks(raise_errors=True)
    assert result.get() == [result.id, 0, [1], {"b": 2}, False, False]


def test_the_request_belongs_to_a_thread():
    """One object, many threads: each sees its own call."""
    both, seen = threading.Barrier(2), []

    @local
    def meet(self, number):
        both.wait(30)
        seen.append((number, self.request.args[0], current_task.request.args[0]))
        both.wait(30)

    threads = [threading.Thread(target=meet.apply, args=((number,),)) for number in (1, 2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(seen) == [(1, 1, 1), (2, 2, 2)]
    assert not current_task


def local(function):
    function.__qualname__ = function.__name__
    return shared_task(bind=True)(function)


def test_a_result_that_is_ignored_need_not_be_json():
    result = object_without_json.delay()
    run_tasks(raise_errors=True)
    assert (result.state, result.get()) == ("SUCCESS", None)


def test_delay_on_commit_is_a_part_of_the_transaction():
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        add.delay_on_commit(1)
        raise ZeroDivisionError
    with transaction.atomic():
        add.apply_async_on_commit((1,), countdown=5)
    assert Row.objects.get().args == [1]


# Results


@shared_task
def fails(kind):
    raise {"value": ValueError, "key": KeyError, "own": Unusual}[kind]("the text: with a colon")


class Unusual(Exception):
    def __init__(self, first, second=None):
        super().__init__(first)


def test_the_exception_of_a_failed_task_is_raised_to_the_caller():
    result = fails.delay("value")
    run_tasks()
    assert (result.state, result.failed()) == ("FAILURE", True)
    with pytest.raises(ValueError, match=r"^the text: with a colon$"):
        result.get()
    assert isinstance(result.get(propagate=False), ValueError)
    assert isinstance(result.result, ValueError)
    assert "in fails" in result.traceback


def test_a_result_is_found_by_its_id_in_each_form():
    result = add.delay(1)
    number = Row.objects.get().pk
    for form in (result.id, number, str(number), UUID(result.id)):
        assert AsyncResult(form) == result
    assert AsyncResult("d6d0f4a8-2c5c-4d35-8a4f-7d9d7a0e7b55").state == "PENDING"


def test_revoke_cancels_and_forget_deletes():
    result = add.delay(1)
    result.forget()
    assert Row.objects.exists()
    result.revoke(terminate=True)
    assert result.state == "REVOKED"
    result.forget()
    assert not Row.objects.exists()


@shared_task
def waits_for(id_):
    return AsyncResult(id_).get()


def test_a_task_does_not_wait_for_another_one():
    waits_for.delay(add.delay(1).id)
    with pytest.raises(RuntimeError, match=r"Never call result.get\(\) within a task"):
        run_tasks(raise_errors=True)


@shared_task(bind=True)
def reports(self):
    self.update_state(state="PROGRESS", meta={"current": 3, "total": 10})
    return AsyncResult(self.request.id).state


def test_progress_is_that_of_the_package():
    reports.delay()
    run_tasks(raise_errors=True)
    assert Row.objects.get().progress == {"done": 3, "total": 10}
    with pytest.raises(TaskOptionError, match="Write other values to a row of your own"):
        reports.update_state(state="PROGRESS", meta={"step": "half"})


# What is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"serializer": "pickle"}, "serializer='pickle' of Celery has no equivalent here. Write nothing: arguments"),
        ({"typing": False}, "the arguments of each call are checked"),
        ({"pydantic": True}, "model_dump"),
        ({"routing_key": "a"}, "Write queue="),
        ({"nonsense": 1}, "nonsense=1 of Celery has no equivalent here"),
        ({"base": dict}, "base is <class 'dict'>; give a class with django_pglock.contrib.celery.Task"),
    ],
)
def test_what_has_no_equivalent_is_refused_at_decoration(options, words):
    with pytest.raises(TaskOptionError, match=words):
        shared_task(**options)(lambda: None)


def test_a_coroutine_function_is_refused():
    async def fetch():
        pass

    with pytest.raises(TaskOptionError, match=r"coroutine function, which Celery does not run either. Write @task"):
        shared_task(fetch)


def test_other_words_of_a_call_and_of_a_task_are_refused():
    with pytest.raises(TaskOptionError, match=r"task_id='x' of Celery has no equivalent here. Write nothing"):
        add.apply_async((1,), task_id="x")
    with pytest.raises(AttributeError, match=r"add.chunks of Celery has no equivalent here. Write group"):
        add.chunks([1], 1)
    assert not Row.objects.exists()


# Eager


@override_settings(CELERY_TASK_ALWAYS_EAGER=True)
def test_eager_calls_run_here_and_get_what_json_makes_of_their_arguments():
    result = echo.delay((1, 2), at=date(2026, 1, 1))
    assert (result.get(), result.state, result.ready()) == ([1, 2], "SUCCESS", True)
    assert not Row.objects.exists()
    failed = fails.delay("key")
    assert (failed.state, type(failed.result)) == ("FAILURE", KeyError)
    with pytest.raises(KeyError):
        failed.get()


@override_settings(CELERY_TASK_ALWAYS_EAGER=True, CELERY_TASK_EAGER_PROPAGATES=True)
def test_eager_calls_may_raise():
    with pytest.raises(ValueError, match="the text"):
        fails.delay("value")


@override_settings(CELERY_TASK_ALWAYS_EAGER=True)
def test_an_eager_delay_on_commit_runs_after_the_commit(django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks() as callbacks:
        assert echo.delay_on_commit(1) is None
    assert len(callbacks) == 1


class Records(Task):
    def on_failure(self, exc, task_id, args, kwargs, einfo):
        Row.objects.filter(pk=args[0]).update(progress={"done": type(exc).__name__, "total": 1})


tidied = []


@shared_task(time_limit=0.2, base=Records)
def too_slow(number):
    try:
        while True:
            sleep(0.05)
            Row.objects.count()
    except SoftTimeLimitExceeded:
        tidied.append(number)


@pytest.mark.django_db(transaction=True)
def test_a_function_may_tidy_up_when_its_time_is_over_and_its_hook_may_write():
    add.apply_async((1,), countdown=10**6)
    pk = Row.objects.get().pk
    result = too_slow.delay(pk)
    run_tasks(until="due")
    assert (result.state, tidied) == ("FAILURE", [pk])
    assert Row.objects.get(pk=pk).progress["done"] == "TaskStopped"


def test_delay_in_a_coroutine_says_what_to_write():
    async def view():
        add.delay(1)

    with pytest.raises(SynchronousOnlyOperation, match=r"Write: await sync_to_async\(task.delay\)"):
        asyncio.run(view())


@shared_task
def takes_a_context(template, context):
    return [template, context]


def test_an_argument_may_be_called_context():
    first, second = takes_a_context.delay("a", {"b": 1}), takes_a_context.delay("a", context={})
    run_tasks(raise_errors=True)
    assert (first.get(), second.get()) == (["a", {"b": 1}], ["a", {}])


def test_a_schedule_checks_the_arguments_of_a_task():
    with pytest.raises(ValidationError, match="missing a required argument: 'x'"):
        Schedule.objects.create(name="wrong", task_path=f"{__name__}.add", expression="every 5 minutes")


def test_a_result_can_be_read_where_the_function_is_not_known(monkeypatch):
    worked, failed = add.delay(1), fails.delay("value")
    run_tasks()
    monkeypatch.setattr(registry, "_definitions", {})
    assert (worked.get(), failed.state) == (1, "FAILURE")
    with pytest.raises(ValueError, match="the text"):
        failed.get()


def test_a_wait_says_why_the_task_has_not_ended():
    with pytest.raises(TimeoutError, match=r"has not finished within 0.1 s: it is READY in the queue 'default'"):
        add.delay(1).get(0.1)
