"""Failed tasks, retried by a person, and the tasks that come after them."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_pglock import enqueue_many
from django_pglock.models import Attempt, Task, Waiter
from django_pglock.store import operate
from django_pglock.store.count import queue_counts
from django_pglock.store.outcome import Failed, Succeeded
from django_pglock.worker.child.settler import waited
from tests.concurrency.store.test_unique import WAITING
from tests.conftest import NEVER
from tests.db.store.endings import FAILURE, settle_one, statuses
from tests.db.store.test_prune import make
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_retried_task_begins_anew(claim):
    """Otherwise a task without retries left would fail at its next error, or would be deleted while it waits."""
    tasks.nothing.using(keep_result=60).enqueue()
    [mine] = claim()
    settle_one(mine, Failed(FAILURE))
    assert Task.objects.get().expires_at is not None
    spent = {"retries": 3, "rescues": 2, "progress": {"done": 1}, "meta": {"snoozes": 4, "trace": "a"}}
    Task.objects.update(**spent, run_after=Now() + timedelta(hours=1), cancel_requested_at=Now())
    assert Task.objects.all().retry() == 1
    row = Task.objects.get()
    assert (row.retries, row.rescues, row.progress, row.meta) == (0, 0, None, {"trace": "a"})
    assert (row.expires_at, row.cancel_requested_at) == (None, None)
    assert (row.status, row.worker, row.finished_at) == ("READY", None, None)
    assert row.attempts == 1, "the token only grows"


def test_a_retried_task_is_ready_since_its_retry(claim):
    """Otherwise the alert for long waits would fire for each task that failed yesterday and is retried now."""
    tasks.nothing.enqueue()
    [mine] = claim()
    settle_one(mine, Failed(FAILURE))
    Task.objects.update(enqueued_at=Now() - timedelta(days=1), started_at=Now() - timedelta(days=1))
    assert Task.objects.all().retry() == 1
    [counted] = queue_counts("default")
    assert counted.oldest_ready is not None
    assert counted.oldest_ready < 3600
    [again] = claim()
    assert (waited(again) or 0) < 3600


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr(operate, "WAIT", "1ms")


def make_failed(**fields):
    return make("FAILED", **fields)


def test_a_retry_leaves_out_tasks_whose_rows_are_locked(locked, short_waits):
    taken, free, unique = make_failed(), make_failed(), make_failed(unique_key="u", unique_scope="UNFINISHED")
    with locked(taken.pk):
        assert Task.objects.all().retry() == 2
    assert statuses() == ["FAILED", "READY", "READY"]
    Task.objects.update(status="FAILED", finished_at=Now())
    with locked(unique.pk):
        assert Task.objects.all().retry() == 2
    assert statuses() == ["READY", "READY", "FAILED"]
    assert free.pk != unique.pk


def test_a_retry_leaves_out_tasks_whose_unique_key_another_transaction_is_taking(session, short_waits):
    """It waits for neither of the two."""
    rows = [make_failed(unique_key=key, unique_scope="UNFINISHED") for key in ("a", "b", "c")]
    session.set_autocommit(False)
    with session.cursor() as cursor:
        cursor.execute(
            """INSERT INTO django_pglock_task (queue, backend, task_path, unique_key, unique_scope)
               VALUES ('default', 'default', 'x', 'b', 'UNFINISHED')"""
        )
        assert Task.objects.all().retry() == 2
        session.commit()
    assert [Task.objects.get(pk=row.pk).status for row in rows] == ["READY", "FAILED", "READY"]
    assert Task.objects.all().retry() == 0


def waits_for(result):
    return Task.objects.get(pk=result.id).waits_for


def failed_chain(claim):
    """Return three tasks, each after the one before; the first has failed."""
    first = tasks.echo.enqueue(1)
    second = tasks.echo.using(after=[first]).enqueue(2)
    third = tasks.echo.using(after=[second]).enqueue(3)
    settle_one(claim()[0], Failed(FAILURE))
    assert statuses() == ["FAILED", "CANCELLED", "CANCELLED"]
    return first, second, third


@pytest.mark.parametrize("window", [1, 5000])
def test_a_chain_that_is_retried_waits_again(claim, monkeypatch, window):
    monkeypatch.setattr(operate, "WINDOW", window)
    failed_chain(claim)
    assert Task.objects.retry() == 3
    for done in range(3):
        assert statuses() == ["SUCCESSFUL"] * done + ["READY"] + ["BLOCKED"] * (2 - done)
        settle_one(claim()[0], Succeeded())
    assert statuses() == ["SUCCESSFUL"] * 3
    assert not Waiter.objects.exists()


def test_a_chain_that_is_retried_in_a_transaction_waits_again(claim):
    failed_chain(claim)
    with transaction.atomic():
        assert Task.objects.order_by("-id").retry() == 3
    assert statuses() == ["READY", "BLOCKED", "BLOCKED"]


def test_a_retried_chain_that_fails_again_is_cancelled_again(claim):
    failed_chain(claim)
    Task.objects.retry()
    settle_one(claim()[0], Failed(FAILURE))
    assert statuses() == ["FAILED", "CANCELLED", "CANCELLED"]


def test_the_tasks_of_a_failed_chain_can_be_retried_one_by_one(claim):
    for each in failed_chain(claim):
        assert Task.objects.filter(pk=each.id).retry() == 1
    assert statuses() == ["READY", "BLOCKED", "BLOCKED"]


def test_a_dependent_retried_without_its_dependency_is_cancelled_again(claim):
    """As a task that is enqueued after a failed one: it needs the success of that task."""
    _, second, third = failed_chain(claim)
    assert Task.objects.filter(pk=second.id).retry() == 1
    assert statuses() == ["FAILED", "CANCELLED", "CANCELLED"]
    third.refresh()
    assert third.errors[0].exception_class_path == "django_pglock.errors.DependencyFailed"
    assert not Waiter.objects.exists()


def test_a_retried_task_does_not_wait_again_for_succeeded_or_deleted_tasks(claim):
    """The task ran once, so its dependencies had succeeded. They may have been pruned."""
    first, second, third = (tasks.echo.enqueue(number) for number in range(3))
    child = tasks.nothing.using(after=[first, second, third]).enqueue()
    one, two, three = claim(3)
    for each in (one, two):
        settle_one(each, Succeeded())
    settle_one(three, Failed(FAILURE))
    Task.objects.filter(pk=first.id).delete()
    Task.objects.retry()
    assert (statuses(), waits_for(child)) == (["SUCCESSFUL", "READY", "BLOCKED"], 1)
    settle_one(claim()[0], Succeeded())
    assert statuses() == ["SUCCESSFUL", "SUCCESSFUL", "READY"]
    settle_one(claim()[0], Failed(FAILURE))
    Task.objects.exclude(pk=child.id).delete()
    assert Task.objects.retry() == 1
    assert statuses() == ["READY"]


def test_a_retried_task_that_was_cancelled_during_its_wait_waits_for_each_once(claim):
    """Its waiter rows from before still exist when it is retried."""
    first, second = tasks.echo.enqueue(1), tasks.echo.enqueue(2)
    child = keyed.step.using(after=[first, second]).enqueue("a")
    other = tasks.nothing.using(after=[first]).enqueue()
    both = Task.objects.filter(pk__in=[child.id, other.id])
    both.cancel()
    assert both.retry() == 2
    assert (waits_for(child), waits_for(other), Waiter.objects.count()) == (2, 1, 3)
    one, two = claim(2)
    settle_one(one, Succeeded())
    assert statuses() == ["SUCCESSFUL", "RUNNING", "BLOCKED", "READY"]
    settle_one(two, Succeeded())
    assert statuses() == ["SUCCESSFUL", "SUCCESSFUL", "READY", "READY"]


@pytest.mark.parametrize(
    ("status", "scope", "attempts", "is_retried"),
    [
        ("READY", "WAITING", 0, False),
        ("RUNNING", "WAITING", 1, True),  # it has left its key at its start
        ("RUNNING", "UNFINISHED", 1, False),
        ("SUCCESSFUL", "UNFINISHED", 1, True),
        ("SUCCESSFUL", "PERIOD", 1, False),
    ],
)
def test_a_task_whose_unique_key_another_one_has_is_not_retried(status, scope, attempts, is_retried):
    row = make("CANCELLED", unique_key="u", unique_scope="WAITING")
    until = Now() + timedelta(hours=1) if scope == "PERIOD" else None
    make(status, unique_key="u", unique_scope=scope, unique_until=until, attempts=attempts)
    assert Task.objects.filter(pk=row.pk).retry() == is_retried


def test_a_retry_and_an_end_at_once_cannot_miss_each_other(in_kept_threads, claim):
    for _ in range(20):
        first = tasks.echo.enqueue(1)
        child = tasks.nothing.using(after=[first]).enqueue()
        Task.objects.filter(pk=child.id).cancel()
        [mine] = claim()

        def work(number, child=child, mine=mine):
            if number:
                settle_one(mine, Succeeded())
            else:
                assert Task.objects.filter(pk=child.id).retry() == 1

        in_kept_threads(work, 2)
        assert statuses() == ["SUCCESSFUL", "READY"]
        assert not Waiter.objects.exists()
        Task.objects.all().delete()


def test_a_retry_of_a_task_without_dependencies_adds_two_small_statements(claim):
    for number in range(3):
        tasks.echo.enqueue(number)
        settle_one(claim()[0], Failed(FAILURE))
    with CaptureQueriesContext(connection) as queries:
        assert Task.objects.retry() == 3
    about_after = [query["sql"] for query in queries if "after" in query["sql"].replace("run_after", "")]
    assert [sql.split()[0] for sql in about_after] == ["SELECT", "WITH"]
    assert not [query for query in queries if "waiter" in query["sql"]]


@pytest.mark.parametrize("is_inside", [False, True], ids=["autocommit", "atomic"])
def test_retry_of_unique_tasks_sends_one_update_for_all(is_inside):
    """After an incident there may be a hundred thousand of them. One statement for each took most of the time."""
    enqueue_many(keyed.rebuild, range(30))
    Task.objects.cancel()
    with CaptureQueriesContext(connection) as queries, transaction.atomic() if is_inside else nullcontext():
        assert Task.objects.retry() == 30
    assert len([each for each in queries if 'UPDATE "django_pglock_task"' in each["sql"]]) == 1
    assert len(queries) < 20


def test_the_callers_lock_timeout_stays_as_it_was():
    enqueue_many(keyed.rebuild, range(2))
    Task.objects.cancel()
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL lock_timeout = '7s'")
        assert Task.objects.retry() == 2
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("7s",)


def test_retry_of_unique_tasks_does_not_deadlock_with_calls_in_another_order(
    claim, in_threads, eventually, monkeypatch
):
    """An UPDATE in the order of the ids and the other transaction wait for each other: the retry gives up."""
    monkeypatch.setattr(operate, "WAIT", "1min")
    for number in (2, 1):
        keyed.rebuild.enqueue(number)
    for mine in claim(2):
        settle_one(mine, Failed(FAILURE))
    has_a_key = threading.Event()

    def work(number):
        if number:
            assert has_a_key.wait(NEVER)
            return Task.objects.filter(status="FAILED").retry()
        with transaction.atomic(), connection.cursor() as cursor:
            # On a slow machine this session may look for a deadlock first, and would be the one that gets the error.
            cursor.execute("SET LOCAL deadlock_timeout = '1h'")
            keyed.rebuild.enqueue(1)
            has_a_key.set()
            eventually(is_session_waiting, why="the retry does not wait for the key")
            keyed.rebuild.enqueue(2)
        return None

    assert in_threads(work, 2) == [None, 0]
    assert statuses() == ["FAILED", "FAILED", "READY", "READY"]


def is_session_waiting():
    with connection.cursor() as cursor:
        # Otherwise the transaction would keep its first snapshot.
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(WAITING)
        return cursor.fetchone()[0] > 0


def test_at_repeatable_read_a_task_whose_unique_key_was_taken_after_the_snapshot_is_left_out(claim, in_threads):
    """The transaction does not see the other task. PostgreSQL refuses the key, and the transaction continues."""
    keyed.rebuild.enqueue(1)
    [mine] = claim()
    settle_one(mine, Failed(FAILURE))
    with transaction.atomic():
        execute_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert Task.objects.count() == 1
        in_threads(lambda number: keyed.rebuild.enqueue(1), 1)
        assert Task.objects.all().retry() == 0
        other = tasks.nothing.enqueue()
    assert statuses() == ["FAILED", "READY", "READY"]
    assert Task.objects.filter(pk=other.id).exists()


def test_the_reason_of_a_cancelled_task_is_that_of_its_last_cancel(claim):
    """It was retried, and another task that it waits for failed."""
    parts = [tasks.echo.enqueue(number) for number in range(2)]
    final = tasks.echo.using(after=parts).enqueue(9)
    settle_one(claim()[0], Failed(FAILURE))
    settle_one(claim()[0], Succeeded())
    Task.objects.filter(pk__in=[parts[0].id, final.id]).retry()
    Task.objects.filter(pk=parts[0].id).cancel()
    final.refresh()
    assert f"after task {parts[0].id}, " in final.errors[0].traceback
    cancelled, reason = Task.objects.get(pk=final.id), Attempt.objects.get(task=final.id)
    assert cancelled.status == "CANCELLED"
    assert abs(cancelled.finished_at - reason.finished_at) < timedelta(seconds=1)
