"""What the code under test enqueues: ``enqueued``, ``patch_enqueue`` and ``make_context``."""

from __future__ import annotations

import unittest
from unittest import mock

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.test import TestCase

from django_pglock import Retry, aenqueue_many, enqueue_many, pytest_plugin, task
from django_pglock.errors import ConfigurationError, TaskArgumentsError
from django_pglock.models import Task
from django_pglock.testing import EnqueuedCall, enqueued, make_context, patch_enqueue, run_tasks
from tests.sample import portable_tasks
from tests.sample.portable_tasks import add
from tests.sample.tasks import nothing

pytestmark = pytest.mark.django_db(transaction=True)

ADD, NOTHING = "tests.sample.portable_tasks.add", "tests.sample.tasks.nothing"


async def every_door(function):
    await function.aenqueue(1, 2)
    await aenqueue_many(function, [(3, 4), {"a": 5, "b": 6}])


def test_calls_of_a_function_are_listed_with_their_arguments_and_options():
    add.enqueue(0, 0)
    with enqueued(add) as calls:
        nothing.enqueue()
        async_to_sync(every_door)(add)
        add.using(priority=7, queue_name="mail", meta={"trace": 1}).enqueue(a=8, b=9)
        add.enqueue_on_commit(10, 11)
    add.enqueue(0, 0)
    assert calls == [
        EnqueuedCall(ADD, (1, 2), {}),
        EnqueuedCall(ADD, (3, 4), {}),
        EnqueuedCall(ADD, (), {"a": 5, "b": 6}),
        EnqueuedCall(ADD, (), {"a": 8, "b": 9}, {"priority": 7, "queue_name": "mail", "meta": {"trace": 1}}),
        EnqueuedCall(ADD, (10, 11), {}),
    ]
    assert [Task.objects.get(pk=int(each.id)).task_path for each in calls] == [ADD] * 5


def test_blocks_may_be_nested_and_a_call_that_is_refused_is_in_no_list():
    with enqueued() as everything, enqueued(nothing) as some:
        add.enqueue(1, 2)
        nothing.enqueue()
        with pytest.raises(TaskArgumentsError):
            add.enqueue(1, 2, 3)
    assert [call.task_path for call in everything] == [ADD, NOTHING]
    assert [call.task_path for call in some] == [NOTHING]


def test_a_call_of_enqueue_on_commit_comes_with_the_commit():
    with enqueued(add) as calls, transaction.atomic():
        add.enqueue_on_commit(1, 2)
        assert calls == []
    assert len(calls) == 1


#: Also where the package is not installed, so that pytest does not find its plug-in.
listed = pytest_plugin.enqueued


def test_the_fixture_lists_calls_to_the_end_of_the_test(listed):
    calls, everything = listed(add), listed()
    add.enqueue(1, 2)
    nothing.enqueue()
    assert ([call.args for call in calls], len(everything)) == ([(1, 2)], 2)


# patch_enqueue


def test_a_mock_gets_the_calls_of_a_function_whatever_the_door_and_the_import():
    with patch_enqueue(ADD) as send, patch_enqueue(NOTHING):
        assert add.enqueue(1, 2) is send.return_value
        async_to_sync(every_door)(portable_tasks.add)
        add.using(priority=7).enqueue(a=8, b=9)
        enqueue_many(add, iter([(10, 11)]))
        add.enqueue_on_commit(12, 13)
        nothing.enqueue()
    assert send.call_args_list == [
        *(mock.call(1, 2), mock.call(1, 2), mock.call(3, 4), mock.call(a=5, b=6), mock.call(a=8, b=9)),
        *(mock.call(10, 11), mock.call(12, 13)),
    ]
    assert not Task.objects.exists()
    add.enqueue(1, 2)
    assert Task.objects.count() == 1


def test_a_mock_refuses_what_enqueue_refuses():
    with patch_enqueue(ADD) as send:
        for arguments in ((1,), (1, 2, 3), (1, object())):
            with pytest.raises(TaskArgumentsError):
                add.enqueue(*arguments)
        send.side_effect = ConnectionError("no broker")
        with pytest.raises(ConnectionError):
            add.enqueue(1, 2)
    assert send.call_count == 1


def test_it_decorates_functions_and_classes_as_mock_patch_does():
    @patch_enqueue(ADD)
    def check(send):
        add.enqueue(1, 2)
        send.assert_called_once_with(1, 2)

    @patch_enqueue(ADD)
    async def acheck(send):
        await add.aenqueue(1, 2)
        send.assert_called_once_with(1, 2)

    @patch_enqueue(ADD)
    class Check(TestCase):
        def test_add(self, send):
            add.enqueue(1, 2)
            send.assert_called_once_with(1, 2)

    check()
    async_to_sync(acheck)()
    assert unittest.TextTestRunner().run(Check("test_add")).wasSuccessful()
    assert not Task.objects.exists()


def test_a_function_that_does_not_exist_is_refused():
    with pytest.raises(ConfigurationError, match=r"patch_enqueue\('tests.sample.tasks.ad'\): there is no such task"):
        patch_enqueue("tests.sample.tasks.ad")


# make_context


def give_up(context, most):
    if context.attempt < most:
        raise Retry
    return context.step("double", lambda: 2 * context.meta["number"])


def test_a_context_has_its_attempt_and_its_meta(own_registry):
    function = task(takes_context=True)(give_up)
    with pytest.raises(Retry):
        give_up(make_context(function), 3)
    assert give_up(make_context(function.using(meta={"number": 4}), attempt=3), 3) == 8


def test_what_is_recorded_runs_as_ever():
    with enqueued(add) as calls:
        add.enqueue(1, 2)
    [run] = run_tasks()
    assert (str(run.task_id), run.result.return_value) == (calls[0].id, 3)
