"""Many calls at once: with a backend that has no call for them, and those that are refused."""

from __future__ import annotations

import pytest
from asgiref.sync import async_to_sync

from django_pglock import aenqueue_many, enqueue_many
from django_pglock.errors import TaskArgumentsError
from django_pglock.tasks.compat import InvalidTask
from tests.sample.tasks import nothing


class Recording:
    """A task whose backend has no ``enqueue_many``."""

    def __init__(self):
        self.calls = []

    def get_backend(self):
        return object()

    def enqueue(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return type("Result", (), {"id": str(len(self.calls))})


CALLS = [{"a": 1}, (1, 2), [3], "text"]


@pytest.mark.parametrize("enqueue", [enqueue_many, async_to_sync(aenqueue_many)])
def test_a_backend_without_a_bulk_call_gets_each_call(enqueue):
    recording = Recording()
    assert enqueue(recording, CALLS) == ["1", "2", "3", "4"]
    assert recording.calls == [((), {"a": 1}), ((1, 2), {}), (([3],), {}), (("text",), {})]


@pytest.mark.parametrize(
    ("calls", "kind"),
    [("text", "a str"), (b"text", "a bytes"), ({"a": 1}, "a dict"), (5, "an int"), (None, "a NoneType")],
)
def test_a_single_call_is_not_a_list_of_calls(calls, kind):
    with pytest.raises(TaskArgumentsError) as error:
        enqueue_many(nothing, calls)
    expected = f"enqueue_many was given {kind}; give a list or a generator with one item for each call."
    assert str(error.value) == expected


def test_a_function_that_is_not_a_task_is_named():
    with pytest.raises(InvalidTask, match=r"enqueue_many was given <built-in function print>, which is not a task"):
        enqueue_many(print, [(1,)])
