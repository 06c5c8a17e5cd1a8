"""Chains, groups, chords and callbacks: which rows there are, who gets which result, and what a failure ends."""

from __future__ import annotations

import json

import pytest
from django.db import transaction
from django.test import override_settings

from django_pglock.contrib.celery import AsyncResult, chain, chord, group, shared_task, signature
from django_pglock.contrib.celery.exceptions import NotRegistered, TaskRevokedError
from django_pglock.models import Task as Row
from django_pglock.testing import run_tasks
from tests.conftest import NEVER

pytestmark = pytest.mark.django_db
calls = []


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


@pytest.fixture(params=["rows", "eager"])
def mode(request):
    """A worker runs the rows, or the calls run at once."""
    with override_settings(CELERY_TASK_ALWAYS_EAGER=request.param == "eager"):
        yield request.param


@shared_task
def add(x, y):
    return x + y


@shared_task
def total(numbers, more=0):
    return sum(numbers) + more


@shared_task
def note(value=None):
    calls.append(value)
    return value


@shared_task
def fail(*args):
    raise ValueError("no")


@shared_task
def errback(task_id):
    calls.append(("old", task_id))


@shared_task
def errback_with_more(request, exc, traceback, name=None):
    calls.append(("new", request.id, type(exc), str(exc), "ValueError: no" in traceback, name))


def value_of(call):
    """Run a call to its end, and return its result."""
    result = call.apply_async()
    run_tasks()
    return result.get()


CASES = {
    "a chain passes results on": (lambda: chain(add.s(1, 2), add.s(4), add.s(8)), 15),
    "by the operator": (lambda: add.s(1, 2) | add.s(4) | add.s(8), 15),
    "an immutable call gets its own arguments": (lambda: add.s(1, 2) | add.si(10, 10), 20),
    "a group": (lambda: group(add.s(number, 1) for number in range(3)), [1, 2, 3]),
    "a group of different calls": (lambda: group(add.s(1, 1), total.s([5]), note.s("x")), [2, 5, "x"]),
    "a chord": (lambda: chord([add.s(1, 1), add.s(2, 2)], total.s()), 6),
    "a chord by the operator": (lambda: group(add.s(1, 1), add.s(2, 2)) | total.s(more=10), 16),
    "a chord without a header": (lambda: chord([], total.s()), 0),
    "a group in a chain gets the result": (lambda: add.s(1, 1) | group(add.s(1), add.s(2)) | total.s(), 7),
    "a chain in a group": (lambda: group(add.s(1, 1) | add.s(1), add.s(0, 9)) | total.s(), 12),
    "a group in a group": (lambda: group(group(add.s(1, 1), add.s(2, 2)), add.s(0, 5)), [[2, 4], 5]),
    "a chord in a chain": (lambda: chain(note.s(3), chord([add.s(1), add.s(2)], total.s()), add.s(100)), 109),
}


@pytest.mark.parametrize(("call", "value"), CASES.values(), ids=CASES)
@pytest.mark.usefixtures("mode")
def test_results_are_passed_along(call, value):
    assert value_of(call()) == value


@pytest.mark.usefixtures("mode")
def test_a_canvas_survives_json():
    for call, value in CASES.values():
        assert value_of(signature(json.loads(json.dumps(call())))) == value


def test_a_chord_may_be_called_with_its_body():
    result = chord([add.s(1, 1), add.s(2, 2)])(total.s())
    run_tasks()
    assert (result.get(), [each.get() for each in result.parent]) == (6, [2, 4])


def test_partial_arguments_come_first():
    result = chain(add.s(1), add.s(1)).apply_async((5,))
    run_tasks()
    assert (result.get(), result.parent.get()) == (7, 6)


def test_all_rows_are_written_at_once_or_none():
    with pytest.raises(TypeError), transaction.atomic():
        chain(add.s(1, 1), add.s(), add.s(1, 2, 3)).apply_async()
    assert not Row.objects.exists()
    chain(add.s(1, 1), add.s(1)).apply_async()
    assert [*Row.objects.order_by("id").values_list("args", "status")] == [([1, 1], "READY"), ([None, 1], "BLOCKED")]


def test_options_of_a_chain_are_those_of_its_first_call_and_links_those_of_its_last():
    chain(add.s(1, 1).set(priority=3), add.s(1)).apply_async(queue="mail", countdown=5, link=note.s())
    queues = [*Row.objects.order_by("id").values_list("queue", "priority")]
    assert queues == [("mail", 3), ("default", 0), ("default", 0)]
    run_tasks()
    assert calls == [3]


@pytest.mark.usefixtures("mode")
def test_callbacks_get_the_result():
    add.apply_async((1, 2), link=[note.s(), note.si("own"), note.s() | note.s()])
    run_tasks()
    assert sorted(calls, key=str) == [3, 3, 3, "own"]


def test_a_callback_gets_a_result_that_is_ignored():
    @local(ignore_result=True)
    def silent():
        return 5

    (silent.s() | note.s()).delay()
    silent.apply_async(link=note.s())
    alone = silent.delay()
    run_tasks()
    assert (calls, alone.get()) == ([5, 5], None)


def local(**options):
    def decorate(function):
        function.__qualname__ = function.__name__
        return shared_task(**options)(function)

    return decorate


def test_a_failure_ends_what_comes_after_it():
    result = (fail.s() | note.s() | note.s()).delay()
    run_tasks()
    assert (result.state, result.parent.state, result.parent.parent.state) == ("REVOKED", "REVOKED", "FAILURE")
    assert calls == []


@pytest.mark.usefixtures("mode")
def test_errbacks_get_the_id_or_the_error():
    result = fail.apply_async(link_error=[errback.s(), errback_with_more.s(name="own"), note.si("plain")])
    run_tasks()
    expected = {("old", result.id), ("new", result.id, ValueError, "no", True, "own"), "plain"}
    assert {*calls} == expected


def test_the_errbacks_of_a_chain_are_called_once():
    call = (note.s(1) | fail.s() | note.s()).on_error(errback.s())
    failed = call.delay().parent
    run_tasks()
    assert calls == [1, ("old", failed.id)]


def test_the_errbacks_of_a_chord_are_called_if_its_body_fails_or_cannot_run():
    never = chord([fail.s(), fail.s(), note.s(1)], total.s().on_error(errback.s())).delay()
    fails = chord([note.s(1)], fail.s()).apply_async(link_error=errback.s())
    works = chord([note.s(1)], total.s().on_error(errback.s())).delay()
    run_tasks()
    assert (never.state, works.get()) == ("REVOKED", 1)
    assert sorted(each for each in calls if each != 1) == sorted([("old", never.id), ("old", fails.id)])


def test_a_call_may_be_an_argument():
    @local()
    def calls_back(callback):
        signature(callback).delay(7)

    calls_back.delay(note.s())
    run_tasks(raise_errors=True)
    assert calls == [7]


def test_a_name_that_is_not_known_is_named():
    with pytest.raises(NotRegistered, match=r"No task is called 'gone.task'. Its module is not imported"):
        signature("gone.task").delay()


def test_a_result_that_was_deleted_is_named():
    result = (add.s(1, 1) | add.s(1)).delay()
    run_tasks(limit=5, until="due")
    number = int(result.parent.id.replace("-", ""))
    Row.objects.filter(pk=number).delete()
    Row.objects.all().update(status="FAILED")
    Row.objects.all().retry()
    with pytest.raises(LookupError, match=rf"The result of task {number} was deleted, see PRUNE_AFTER"):
        run_tasks(raise_errors=True)


@pytest.mark.django_db(transaction=True)
def test_the_body_of_a_chord_runs_once_however_many_threads_end_its_header(worker):
    """The last calls of the header end at the same time, in threads of two workers."""
    results = [chord([add.s(number, 1) for number in range(20)], note.s() | total.s()).delay() for _ in range(5)]
    failed = chord([fail.s() for _ in range(8)], total.s().on_error(errback.s())).delay()
    for _ in range(2):
        worker(threads=4)
    assert [each.get(NEVER) for each in results] == [210] * 5
    with pytest.raises(TaskRevokedError):
        failed.get(NEVER)
    handler = Row.objects.filter(task_path__endswith="call_errbacks").values_list("pk", flat=True)
    for number in handler:
        AsyncResult(number).get(NEVER)
    AsyncResult(Row.objects.filter(task_path__endswith=".errback").get().pk).get(NEVER)
    assert sorted(each for each in calls if isinstance(each, list)) == [list(range(1, 21))] * 5
    assert [each for each in calls if isinstance(each, tuple)] == [("old", failed.id)]
