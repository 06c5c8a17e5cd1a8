"""``django.tasks`` user code, unchanged: through the backport on 5.2, natively on 6.0 and 6.1."""

from __future__ import annotations

from datetime import timedelta

import django
import pytest
from django.utils import timezone

from django_pglock.tasks.compat import InvalidTask, TaskResultStatus, task_backends
from tests.sample import portable_tasks as tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def finished(worker, eventually):
    worker()

    def wait(result):
        def look():
            result.refresh()
            return result.is_finished

        eventually(look)
        return result

    return wait


def test_what_the_documentation_shows_works(finished):
    result = finished(tasks.add.enqueue(1, b=2))
    assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, 3)
    assert tasks.add.get_result(result.id).return_value == 3
    assert (result.args, result.kwargs, result.backend) == ([1], {"b": 2}, "default")
    assert len(result.worker_ids) == result.attempts == 1


def test_context_priority_and_queue(finished):
    result = tasks.email_users.enqueue(emails=["a@example.com"], subject="Hi", message="…")
    assert finished(result).return_value == {"attempt": 1, "to": ["a@example.com"], "subject": "Hi"}
    stored = task_backends["default"].get_result(result.id)
    assert (stored.task.priority, stored.task.queue_name) == (2, "emails")


def test_async_tasks_and_async_calls(finished):
    from asgiref.sync import async_to_sync

    result = async_to_sync(tasks.fetch.aenqueue)("url")
    assert finished(result).return_value == "URL"
    assert async_to_sync(tasks.fetch.aget_result)(result.id).return_value == "URL"


def test_errors_are_as_documented(finished):
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


def test_another_tasks_result_is_a_mismatch(finished):
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
