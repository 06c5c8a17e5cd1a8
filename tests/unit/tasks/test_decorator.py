"""``@task``: each way of writing it makes the same object, or says what is wrong with an option."""

from __future__ import annotations

import pytest

from django_pglock import task
from django_pglock.errors import TaskOptionError
from django_pglock.tasks.compat import BaseTaskBackend
from django_pglock.tasks.definition import PostgresTask

pytestmark = pytest.mark.usefixtures("own_registry")

IMMEDIATE = f"{BaseTaskBackend.__module__.removesuffix('base')}immediate.ImmediateBackend"


def send(order):
    return order


def test_the_decorator_is_written_with_brackets_or_without():
    plain, called, with_options = task(send), task()(send), task(priority=5)(send)
    assert plain == called
    assert (plain.priority, with_options.priority) == (0, 5)
    assert plain.func is with_options.func is send


def test_a_function_keeps_our_options_with_another_backend(settings):
    """Tests of projects replace the backend by one of Django's own."""
    settings.TASKS = {"default": {"BACKEND": IMMEDIATE}}
    decorated = task(max_attempts=3, lock="order:{order}")(send)
    assert isinstance(decorated, PostgresTask)
    assert (decorated.max_attempts, decorated.lock) == (3, "order:{order}")
    assert decorated.enqueue(7).return_value == 7


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_retries": 3}, r"@task on send has no option 'max_retries'; .*max_attempts"),
        ({"run_after": 5}, r"@task on send: run_after is an option of a single call\. Write task\.using\(run_after="),
        ({"func": send}, r"@task on send has no option 'func'"),
        ({"zzz": 1, "after": 1}, r"after is an option of a single call.* has no option 'zzz'"),
    ],
)
def test_all_options_that_the_decorator_does_not_take_are_named_at_once(options, text):
    with pytest.raises(TaskOptionError, match=text):
        task(**options)(send)
