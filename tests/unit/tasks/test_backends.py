"""The backend of a key: the same everywhere, evenly spread, and with as few moves as possible."""

from __future__ import annotations

from collections import Counter

import pytest
from asgiref.sync import async_to_sync

from django_pglock import aenqueue_many, backend_for, enqueue_many
from django_pglock.errors import TaskArgumentsError
from django_pglock.tasks.compat import InvalidTask
from tests.sample.tasks import nothing

KEYS = range(3000)


def places(*backends):
    return {key: backend_for("customer", key, backends=backends) for key in KEYS}


def test_the_backend_of_a_key_is_the_same_in_each_process_and_version():
    """If the result changed with an upgrade, the tasks of a key would go to two servers."""
    assert [backend_for("customer", key, backends=["a", "b", "c"]) for key in range(8)] == list("cacaccba")


def test_the_order_of_the_backends_does_not_matter():
    assert places("a", "b", "c") == places("c", "a", "b")


def test_the_keys_are_spread_evenly():
    counts = Counter(places("a", "b", "c", "d").values())
    assert all(650 <= count <= 850 for count in counts.values())


def test_a_new_backend_takes_its_share_and_no_other_key_moves():
    before, after = places("a", "b", "c"), places("a", "b", "c", "d")
    moved = {key for key in KEYS if before[key] != after[key]}
    assert {after[key] for key in moved} == {"d"}
    assert 650 <= len(moved) <= 850


@pytest.mark.parametrize("backends", [[], (), "tasks"])
def test_wrong_backends_are_refused(backends):
    with pytest.raises(ValueError, match="give the aliases of at least one backend"):
        backend_for(1, backends=backends)


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
