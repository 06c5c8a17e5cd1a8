"""``django.tasks`` user code, unchanged: through the backport on 5.2, natively on 6.0 and 6.1."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta

import django
import pytest
from django.db import ProgrammingError, transaction
from django.test import override_settings
from django.utils import timezone

from django_pglock import enqueue_many
from django_pglock import task as own_task
from django_pglock.backend import PostgresBackend
from django_pglock.errors import TaskOptionError
from django_pglock.models import Task
from django_pglock.tasks import registry
from django_pglock.tasks.compat import BaseTaskBackend, InvalidTask, TaskResultStatus, task_backends, task_enqueued
from tests.sample import keyed_tasks, step_tasks
from tests.sample import portable_tasks as tasks
from tests.sample import tasks as own_tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def finished(worker, finished):
    worker()
    return finished


def test_a_result_has_the_fields_of_the_documentation_of_django(finished):
    result = finished(tasks.add.enqueue(1, b=2))
    assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, 3)
    assert tasks.add.get_result(result.id).return_value == 3
    assert (result.args, result.kwargs, result.backend) == ([1], {"b": 2}, "default")
    assert len(result.worker_ids) == result.attempts == 1


def test_a_task_gets_its_context_and_keeps_priority_and_queue(finished):
    result = tasks.email_users.enqueue(emails=["a@example.com"], subject="Hi", message="…")
    assert finished(result).return_value == {"attempt": 1, "to": ["a@example.com"], "subject": "Hi"}
    stored = task_backends["default"].get_result(result.id)
    assert (stored.task.priority, stored.task.queue_name) == (2, "emails")


def test_async_tasks_and_async_calls(finished):
    from asgiref.sync import async_to_sync

    result = async_to_sync(tasks.fetch.aenqueue)("url")
    assert finished(result).return_value == "URL"
    assert async_to_sync(tasks.fetch.aget_result)(result.id).return_value == "URL"


def test_a_failed_result_has_the_errors_of_the_documentation_of_django(finished):
    result = finished(tasks.explode.enqueue())
    assert result.status == TaskResultStatus.FAILED
    assert result.errors[0].exception_class is RuntimeError
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value


def test_using_changes_one_call_and_validates(finished):
    later = tasks.add.using(run_after=timezone.now() + timedelta(hours=1), priority=-3)
    assert later.priority == -3
    assert later.enqueue(1, 2).status == TaskResultStatus.READY
    with pytest.raises(InvalidTask):
        tasks.add.using(priority=101)
    with pytest.raises(InvalidTask):
        tasks.add.using(run_after=timezone.now().replace(tzinfo=None))


@pytest.mark.parametrize("has_time_zones", [True, False])
@pytest.mark.parametrize("later", [keyed_tasks.gather, own_tasks.nothing.using(run_after=timedelta(hours=1))])
def test_a_result_and_its_signal_have_the_date_at_which_the_task_is_due(settings, later, has_time_zones):
    """django.tasks declares a date or None. Packages that record enqueued tasks store it in a DateTimeField."""
    settings.USE_TZ = has_time_zones
    heard = []

    def hear(task_result, **kwargs):
        heard.append(task_result.task.run_after)

    task_enqueued.connect(hear)
    try:
        result = later.enqueue(**({"user": 1} if later is keyed_tasks.gather else {}))
    finally:
        task_enqueued.disconnect(hear)
    assert heard == [result.task.run_after] == [Task.objects.get(pk=result.id).run_after]


def test_a_queue_that_the_settings_do_not_list_is_refused_with_the_setting(settings):
    """Without QUEUES, Django lists "default" only, so a new project meets this message first."""
    settings.TASKS = {"default": {"BACKEND": "django_pglock.backend.PostgresBackend"}}
    expected = (
        "The queue 'mail' of tests.sample.tasks.echo is not in QUEUES of TASKS['default'], which has 'default'. "
        "Add it there; [] allows every name."
    )
    with pytest.raises(InvalidTask) as error:
        own_tasks.echo.using(queue_name="mail")
    assert str(error.value) == expected
    settings.TASKS = {"default": {"BACKEND": "django_pglock.backend.PostgresBackend", "QUEUES": ["default", "mail"]}}
    assert own_tasks.echo.using(queue_name="mail").queue_name == "mail"


def test_get_result_refuses_the_result_of_another_task(finished):
    result = finished(tasks.add.enqueue(1, 2))
    with pytest.raises(Exception, match="Task does not match"):
        tasks.explode.get_result(result.id)


def test_every_capability_of_the_contract_is_claimed():
    backend = task_backends["default"]
    for name in ("supports_defer", "supports_async_task", "supports_get_result", "supports_priority"):
        assert getattr(backend, name) is True


@pytest.mark.skipif(not django.VERSION >= (6, 1), reason="Django's own decorator takes options from 6.1 on")
def test_djangos_own_decorator_takes_our_options():
    from django.tasks import task

    assert task(max_attempts=4)(tasks.add.func).max_attempts == 4
    with pytest.raises(TaskOptionError, match="write max_attempts, which counts the first attempt"):
        task(retries=3)(tasks.add.func)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize(
    "task",
    [
        pytest.param(own_tasks.echo, id="definition"),
        pytest.param(own_tasks.echo.using(timeout=5, priority=7, meta={"a": [1]}), id="using"),
        pytest.param(keyed_tasks.remind, id="unique"),
        pytest.param(keyed_tasks.gather, id="group"),
        pytest.param(keyed_tasks.trickle, id="rate"),
    ],
)
def test_a_copy_of_a_task_is_equal_and_asks_for_the_same(task, duplicate):
    """Django's DummyBackend copies tasks. Caches and process pools pickle them."""
    again = duplicate(task)
    assert again == task
    assert again is not task
    assert again.carried == task.carried


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_a_task_runs(finished, duplicate):
    result = duplicate(own_tasks.echo.using(timeout=5)).enqueue("x")
    assert duplicate(finished(result)).return_value == "x"


def test_a_pickled_task_imports_its_module(own_registry):
    """As in a process of a pool, which has not imported the module."""
    data = pickle.dumps(own_tasks.echo.using(priority=3))
    del registry._definitions[own_tasks.echo.module_path]
    assert pickle.loads(data).func is own_tasks.echo.func


def backend_of_django(name):
    return override_settings(TASKS={"default": {"BACKEND": f"{BaseTaskBackend.__module__.removesuffix('base')}{name}"}})


def test_djangos_dummy_backend_keeps_the_calls():
    with backend_of_django("dummy.DummyBackend"):
        result = own_tasks.echo.using(priority=5).enqueue("x")
        enqueue_many(own_tasks.echo, ["y", "z"])
        kept = task_backends["default"].results
        assert [each.args for each in kept] == [["x"], ["y"], ["z"]]
        assert own_tasks.echo.get_result(result.id).task.priority == result.task.priority == 5
        assert keyed_tasks.remind.enqueue(1).status == TaskResultStatus.READY
        later = own_tasks.echo.using(run_after=timedelta(hours=1)).enqueue("x").task.run_after
        assert timedelta(minutes=59) < later - timezone.now() <= timedelta(hours=1)


def test_djangos_immediate_backend_runs_the_calls():
    with backend_of_django("immediate.ImmediateBackend"):
        assert own_tasks.echo.using(priority=5).enqueue("x").return_value == "x"
        assert own_tasks.tell_context.enqueue("x").return_value[2] == "x"
        assert pickled(own_tasks.echo.enqueue("y")).return_value == "y"
        without_steps = step_tasks.order.enqueue(7)
        assert "context.step needs django_pglock.backend.PostgresBackend" in without_steps.errors[0].traceback
        failed = own_tasks.fail.enqueue("no")
        assert (failed.status, failed.errors[0].exception_class) == (TaskResultStatus.FAILED, ValueError)


# Functions that no worker can import


def defined_by(source, name, **namespace):
    """Define a function in ``__main__``, as in a shell or a script."""
    exec(source, namespace)
    return namespace[name]


def defined_inside():
    @own_task
    def inner(): ...

    return inner


NOT_FOUND = {
    "django's shell": lambda: own_task(defined_by("def f(): ...", "f")),
    "a script, a notebook": lambda: own_task(defined_by("def f(): ...", "f", __name__="__main__")),
    "a module that is gone": lambda: own_task(defined_by("def f(): ...", "f", __name__="no.such.module")),
    "a lambda": lambda: own_task(defined_by("f = lambda: None", "f", __name__=__name__)),
    "a closure": defined_inside,
}


@pytest.mark.parametrize("define", NOT_FOUND.values(), ids=NOT_FOUND)
@pytest.mark.usefixtures("own_registry")
def test_a_function_that_no_worker_could_find_is_refused_with_the_reason(define):
    """The task would wait forever. Django refuses some of these functions at decoration."""
    for enqueue in (
        lambda task: task.enqueue(),
        lambda task: task.enqueue_on_commit(),
        lambda task: enqueue_many(task, [()]),
    ):
        with pytest.raises(
            InvalidTask, match=r"which no worker can import|no worker can import it by name|at a module level"
        ):
            enqueue(define())
    assert not Task.objects.exists()


@pytest.mark.parametrize("enqueue", [lambda: own_tasks.echo.enqueue(1), lambda: enqueue_many(own_tasks.echo, [1])])
def test_a_call_before_migrate_says_what_to_run(enqueue):
    with transaction.atomic():
        execute_sql("ALTER TABLE django_pglock_task RENAME TO elsewhere")
        with pytest.raises(ProgrammingError, match=r"(?s)does not exist.*Run: manage.py migrate --database default"):
            enqueue()
        transaction.set_rollback(True)


class StrictBackend(PostgresBackend):
    """A project's own backend, whose rule may change."""

    is_closed = False

    def validate_task(self, task):
        super().validate_task(task)
        if self.is_closed:
            raise InvalidTask("Closed.")


def test_the_rules_of_a_projects_own_backend_are_asked_at_each_enqueue(settings, monkeypatch):
    settings.TASKS = {"default": {**settings.TASKS["default"], "BACKEND": f"{__name__}.StrictBackend"}}
    own_tasks.echo.enqueue(1)
    monkeypatch.setattr(StrictBackend, "is_closed", True)
    for enqueue in (lambda: own_tasks.echo.enqueue(2), lambda: enqueue_many(own_tasks.echo, [(3,)])):
        with pytest.raises(InvalidTask, match="Closed"):
            enqueue()
    assert Task.objects.count() == 1
