"""The methods of a task: enqueueing after the commit, metadata, and checks of options and arguments."""

from __future__ import annotations

import asyncio
from functools import wraps
from unittest.mock import Mock

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, connections, transaction

from django_pglock import enqueue_many, task
from django_pglock.backend import PostgresBackend
from django_pglock.errors import LockKeyError, TaskArgumentsError, TaskOptionError
from django_pglock.models import Queue, Schedule, Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.tasks.compat import InvalidTask
from django_pglock.testing import run_tasks
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_on_commit_means_after_the_commit_and_never_after_a_rollback():
    with transaction.atomic():
        tasks.echo.enqueue_on_commit(value=1)
        assert not Task.objects.exists()
    assert Task.objects.get().kwargs == {"value": 1}
    with transaction.atomic():
        tasks.echo.enqueue_on_commit(2)
        transaction.set_rollback(True)
    tasks.echo.enqueue_on_commit(3)
    assert [row.args for row in Task.objects.order_by("id")] == [[], [3]]


@pytest.fixture
def elsewhere(monkeypatch):
    """Add a connection to another database, with autocommit off."""
    other = dedicated_connection("default")
    other.alias = "elsewhere"
    other.set_autocommit(False)
    monkeypatch.setattr(connections, "all", lambda initialized_only=False: [connection, other])
    yield other
    other.close()


def test_on_commit_is_refused_while_another_database_has_a_transaction_that_the_caller_commits(elsewhere):
    """Django calls no function after that commit, so the task would run before it."""
    with elsewhere.cursor() as cursor:
        cursor.execute("SELECT 1")
    with pytest.raises(transaction.TransactionManagementError, match=r"echo\.enqueue_on_commit.* 'elsewhere'"):
        tasks.echo.enqueue_on_commit(1)
    assert not Task.objects.exists()
    elsewhere.commit()
    elsewhere.set_autocommit(True)
    tasks.echo.enqueue_on_commit(2)
    assert Task.objects.get().args == [2]


def test_on_commit_is_refused_before_the_first_statement_of_such_a_transaction(elsewhere):
    """Otherwise the task would be enqueued at once, and a rollback of this transaction would not undo it."""
    with pytest.raises(transaction.TransactionManagementError, match="'elsewhere'"):
        tasks.echo.enqueue_on_commit(1)
    # Django closes the session, and the next one has the setting of DATABASES.
    elsewhere.close()
    tasks.echo.enqueue_on_commit(2)
    elsewhere.settings_dict = {**elsewhere.settings_dict, "AUTOCOMMIT": False}
    with pytest.raises(transaction.TransactionManagementError, match="'elsewhere'"):
        tasks.echo.enqueue_on_commit(3)
    assert Task.objects.get().args == [2]


def test_on_commit_is_refused_if_a_database_without_a_session_has_autocommit_off(monkeypatch):
    """Its transaction begins with the first statement of this thread, which has not even made a connection object."""
    monkeypatch.setitem(connections.settings, "legacy", {**connections.settings["default"], "AUTOCOMMIT": False})
    with pytest.raises(transaction.TransactionManagementError, match="'legacy'"):
        tasks.echo.enqueue_on_commit(1)
    assert not Task.objects.exists()


def test_on_commit_is_a_part_of_a_transaction_of_its_own_database_that_the_caller_commits():
    transaction.set_autocommit(False)
    try:
        tasks.echo.enqueue_on_commit(1)
        transaction.rollback()
        tasks.echo.enqueue_on_commit(2)
        # This block does not commit, and Django forgets its functions.
        with transaction.atomic():
            tasks.echo.enqueue_on_commit(3)
        transaction.commit()
    finally:
        transaction.set_autocommit(True)
    assert [row.args for row in Task.objects.order_by("id")] == [[2], [3]]


def test_on_commit_is_refused_if_it_would_have_to_wait_for_another_database_beside_the_callers_own_commit(elsewhere):
    """The caller may roll its own transaction back before the other database commits."""
    elsewhere.set_autocommit(True)
    transaction.set_autocommit(False)
    try:
        elsewhere.in_atomic_block = elsewhere.commit_on_exit = True
        with pytest.raises(transaction.TransactionManagementError, match="'default'"):
            tasks.echo.enqueue_on_commit(1)
    finally:
        elsewhere.in_atomic_block = False
        transaction.rollback()
        transaction.set_autocommit(True)
    assert not Task.objects.exists()


@pytest.mark.parametrize(
    "enqueue",
    [
        lambda: tasks.record.enqueue(nmae=1),
        lambda: tasks.record.enqueue_on_commit(nmae=1),
        lambda: enqueue_many(tasks.record, [{"name": 1}, {"nmae": 1}]),
    ],
    ids=["enqueue", "enqueue_on_commit", "enqueue_many"],
)
def test_a_call_that_the_function_does_not_take_is_a_type_error_at_once(enqueue):
    """Otherwise the task would fail later, in a worker."""
    with pytest.raises(TypeError) as refused:
        enqueue()
    assert isinstance(refused.value, TaskArgumentsError)
    assert "tests.sample.tasks.record() " in str(refused.value)
    assert "It takes (name, number=0)." in str(refused.value)
    assert not Task.objects.exists()


def test_the_context_is_no_argument_of_a_call():
    tasks.tell_context.enqueue(5)
    with pytest.raises(TypeError, match=r"tell_context\(\) got too many positional arguments. It takes \(value\)"):
        tasks.tell_context.enqueue("context", 5)


def test_an_unknown_option_through_djangos_own_decorator_is_refused():
    """From 6.1 on it passes all options on to the class that the backend names."""
    with pytest.raises(TaskOptionError, match="@task on echo has no option 'retries'"):
        PostgresBackend.task_class(func=tasks.echo.func, retries=3)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda result: tasks.echo.enqueue(1), r"echo.enqueue\(\) blocks .* Write: await echo.aenqueue\(…\)"),
        (lambda result: tasks.echo.using(priority=1).enqueue(1), r"Write: await echo.aenqueue\(…\)"),
        (lambda result: tasks.echo.enqueue_on_commit(1), r"Write: await echo.aenqueue\(…\)"),
        (lambda result: enqueue_many(tasks.echo, [1]), r"Write: await aenqueue_many\(…\)"),
        (lambda result: Task.objects.cancel(), r"cancel\(\) blocks .* Write: await sync_to_async\(rows.cancel\)"),
        (lambda result: Task.objects.filter(pk=result.id).retry(), r"Write: await sync_to_async\(rows.retry\)"),
        (lambda result: Schedule.objects.all().disable(), r"Write: await sync_to_async\(rows.disable\)"),
        (lambda result: Queue.objects.pause("x"), r"Write: await sync_to_async\(rows.pause\)"),
        (lambda result: result.wait(), r"Write: await result.await_\(…\)"),
    ],
)
def test_a_call_that_would_block_the_event_loop_says_what_to_await_instead(call, said):
    async def in_coroutine():
        result = await tasks.echo.aenqueue(1)
        try:
            with pytest.raises(SynchronousOnlyOperation, match=said):
                call(result)
        finally:
            await sync_to_async(connections.close_all)()

    asyncio.run(in_coroutine())
    assert Task.objects.count() == 1


def check_and_report(context, number, *, double=False):
    """A function as people write it: it asks, reports, and reads what its call was given."""
    context.check()
    context.progress(1, 2)
    return [number * (1 + double), context.attempt, context.meta, context.fencing_token, context.task_result.args]


async def check_in_coroutine(context, number):
    return check_and_report(context, number)


def test_a_call_without_a_worker_has_a_context(own_registry):
    report = task(takes_context=True)(check_and_report)
    assert report.call(2, double=True) == [4, 1, {}, 1, [2]]
    assert report.using(meta={"trace": "x"}).call(2) == [2, 1, {"trace": "x"}, 1, [2]]
    coroutine = task(takes_context=True)(check_in_coroutine)
    assert coroutine.call(3) == asyncio.run(coroutine.acall(3)) == [3, 1, {}, 1, [3]]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'number'"):
        report.call()


def test_a_call_keeps_the_context_that_a_test_gives_it(own_registry):
    fake = Mock(attempt=7, meta={"fake": True})
    report = task(takes_context=True)(check_and_report)
    assert report.call(fake, 2)[:3] == report.call(context=fake, number=2)[:3] == [2, 7, {"fake": True}]
    fake.progress.assert_called_with(1, 2)


def test_a_function_without_a_context_is_refused(own_registry):
    with pytest.raises(InvalidTask, match="context"):
        task(takes_context=True)(tasks.nothing.func)


def test_a_function_whose_decorator_uses_wraps_has_its_context(own_registry):
    @wraps(check_and_report)
    def decorated(*args, **kwargs):
        return check_and_report(*args, **kwargs)

    assert task(takes_context=True)(decorated).call(2)[0] == 2


# Hooks: a decorator of the project below @task(takes_context=True)


SEEN = []


def noted(function):
    """Note each attempt, and its end."""

    @wraps(function)
    def inner(context, *args, **kwargs):
        SEEN.append((context.attempt, args, kwargs))
        try:
            return function(*args, **kwargs)
        finally:
            SEEN.append("ended")

    return inner


def double(number, add=0):
    return 2 * number + add


@pytest.fixture
def hooked(own_registry):
    SEEN.clear()
    return task(takes_context=True, lock="number:{number}", unique=True)(noted(double))


def test_a_decorator_takes_the_context_that_its_function_does_not_have(hooked):
    hooked.using(priority=3).enqueue(2)
    enqueue_many(hooked, [(3,)])
    [first, second] = run_tasks()
    assert [each.result.return_value for each in (first, second)] == [4, 6]
    assert SEEN == [(1, (2,), {}), "ended", (1, (3,), {}), "ended"]
    assert [Task.objects.get(pk=each.task_id).lock_key for each in (first, second)] == ["number:2", "number:3"]
    assert hooked.call(4, add=1) == 9


def test_the_keys_of_such_a_function_are_those_of_the_function_that_is_wrapped(hooked):
    """By position and by name it is the same call. A name that the function does not have is refused."""
    one, same = hooked.enqueue(5), hooked.enqueue(number=5, add=0)
    assert one.id == same.id
    with pytest.raises(TaskArgumentsError, match="colour"):
        hooked.enqueue(5, colour=1)
    with pytest.raises(LockKeyError, match="nobody"):
        task(takes_context=True, lock="of:{nobody}")(noted(double))


def test_a_schedule_may_call_a_function_with_such_a_decorator(own_registry):
    with pytest.raises(TaskOptionError, match="missing a required argument: 'number'"):
        task(takes_context=True, every=5)(noted(double))
