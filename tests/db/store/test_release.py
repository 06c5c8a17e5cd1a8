"""Releasing the dependents of a task that has ended."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_pglock import enqueue_many
from django_pglock.models import Attempt, Task, Waiter
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store import release as release_module
from django_pglock.store.admit import admit
from django_pglock.store.outcome import Failed, Succeeded
from django_pglock.store.release import (
    RELEASE,
    RELEASE_UNLOCKED,
    ended,
    orphaned_waiters,
    release,
    release_on_commit,
    write_waiters,
)
from django_pglock.store.settle import settle
from django_pglock.store.statements import run
from tests.db.store.endings import FAILURE, settle_one, statuses
from tests.db.store.waiting import results_of
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def test_no_task_of_the_key_is_admitted_between_the_end_and_the_promotion(claim):
    """A task that is admitted after its predecessor has ended, and before the waiters are promoted."""
    first = keyed.step.enqueue("a", 1)
    keyed.step.using(after=[first]).enqueue("a", 2)
    keyed.step.enqueue("a", 3)
    settle("default", [(claim()[0], Succeeded())], uuid4())
    admit("default", ["order:a"])
    assert statuses() == ["SUCCESSFUL", "BLOCKED", "BLOCKED"]
    release("default", [int(first.id)])
    assert statuses() == ["SUCCESSFUL", "READY", "BLOCKED"]


def test_a_task_enqueued_later_at_a_key_does_not_delay_the_admission(claim):
    """The later task waits for its key in any case, so its dependency does not delay others."""
    for _ in range(4):
        keyed.call.enqueue("a")
    ended = tasks.echo.enqueue(1)
    keyed.call.using(after=[ended]).enqueue("a")
    claims = claim(4)
    settle("default", [(claims[-1], Succeeded()), (claims[0], Succeeded())], uuid4())
    assert statuses() == ["SUCCESSFUL", "RUNNING", "RUNNING", "BLOCKED", "SUCCESSFUL", "BLOCKED"]
    admit("default", ["api:a"])
    assert statuses()[3:] == ["READY", "SUCCESSFUL", "BLOCKED"]


def test_the_first_waiting_tasks_are_released_first_whatever_the_order_of_their_rows_is(monkeypatch):
    """Otherwise a later task of a lock key could be admitted before an earlier task that is not released yet."""
    ended = tasks.echo.enqueue(0)
    ids = [int(id_) for id_ in enqueue_many(tasks.echo.using(after=[ended]), range(5))]
    Waiter.objects.all().delete()
    Waiter.objects.bulk_create(Waiter(awaited=int(ended.id), task_id=id_) for id_ in reversed(ids))
    Task.objects.filter(pk=ended.id).update(status="SUCCESSFUL", finished_at=Now())
    monkeypatch.setattr(release_module, "RELEASED_AT_ONCE", 2)
    with connection.cursor() as cursor:
        # The index has this order. The planner may also read the table.
        cursor.execute("SET enable_indexscan = off")
    moved, _ = release_module._release("default", [int(ended.id)])
    assert sorted(id_ for id_, *_ in moved) == ids[:2]


def test_a_cancelled_task_does_not_block_others_of_its_key(claim):
    first, other = tasks.echo.enqueue(1), tasks.echo.enqueue(2)
    keyed.step.using(after=[first, other]).enqueue("a", 1)
    one, two = claim(2)
    settle("default", [(one, Failed(FAILURE)), (two, Succeeded())], one.worker)
    keyed.step.enqueue("a", 2)
    assert statuses()[2:] == ["BLOCKED", "BLOCKED"]
    release("default", [int(first.id)])
    assert statuses()[2:] == ["CANCELLED", "READY"]


def test_dependents_of_a_deleted_task_are_cancelled_and_lock_timeout_is_kept(claim):
    first = tasks.echo.enqueue(1)
    tasks.echo.using(after=first).enqueue(2)
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM django_pglock_task WHERE id = %s", [int(first.id)])
        assert release("default", [int(first.id)]) == 1
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("0",)
    assert statuses() == ["CANCELLED"]


def test_release_wakes_workers_for_ready_tasks_and_notifies_them_of_scheduled_ones(claim, monkeypatch):
    """A task with a key is admitted, which wakes them."""
    woken = []
    monkeypatch.setattr(release_module, "wake", lambda using, queues: woken.extend(queues))
    monkeypatch.setattr(release_module, "wake_parents", lambda using: woken.append("parents"))
    first = tasks.echo.using(priority=1).enqueue(1)
    tasks.nothing.using(after=first, queue_name="mail").enqueue()
    tasks.nothing.using(after=first, queue_name="later", run_after=timedelta(hours=1)).enqueue()
    keyed.step.using(after=first, queue_name="keyed").enqueue("a", 1)
    settle("default", [(claim()[0], Succeeded())], uuid4())
    assert release("default", [int(first.id)]) == 3
    assert woken == ["mail", "parents"]


def test_waiters_are_released_after_the_commit(claim):
    first = tasks.echo.using(priority=1).enqueue(1)
    tasks.nothing.using(after=first).enqueue()
    settle("default", [(claim()[0], Succeeded())], uuid4())
    with transaction.atomic():
        release_on_commit("default", [int(first.id)])
        assert statuses() == ["SUCCESSFUL", "BLOCKED"]
    assert statuses() == ["SUCCESSFUL", "READY"]
    with CaptureQueriesContext(connection) as queries:
        release_on_commit("default", [])
    assert len(queries) == 0


def test_each_dependent_follows_the_outcome_of_its_own_dependency(claim):
    """One statement releases all of them, and each dependent follows its own dependency."""
    for number in range(2):
        tasks.nothing.using(after=[tasks.echo.using(priority=1).enqueue(number)]).enqueue()
    one, two = claim(2)
    of_both = tasks.nothing.using(after=[one.id, two.id]).enqueue()
    Task.objects.filter(pk=of_both.id).update(attempts=3, uncounted=1)
    cancelled = tasks.nothing.using(after=[one.id]).enqueue()
    Task.objects.filter(pk=cancelled.id).update(status="CANCELLED", finished_at=Now())
    settle("default", [(one, Succeeded()), (two, Failed(FAILURE))], one.worker)
    assert release("default", [one.id, two.id]) == 3
    assert statuses() == ["SUCCESSFUL", "READY", "FAILED", "CANCELLED", "CANCELLED", "CANCELLED"]
    assert f"after task {two.id}," in Attempt.objects.get(task=of_both.id, number=2).traceback


def test_a_locked_row_does_not_delay_other_waiters(claim, locked):
    """The process that promotes them does not wait, because upkeep repeats the release."""
    first = tasks.echo.enqueue(1)
    held = tasks.nothing.using(after=[first]).enqueue()
    tasks.nothing.using(after=[first]).enqueue()
    with locked(held.id):
        settle_one(claim()[0], Succeeded())
        assert statuses() == ["SUCCESSFUL", "BLOCKED", "READY"]
    assert list(Waiter.objects.values_list("awaited", "task")) == [(int(first.id), int(held.id))]
    release("default", [awaited for _, awaited in orphaned_waiters("default", 0)])
    assert statuses() == ["SUCCESSFUL", "READY", "READY"]
    assert not Waiter.objects.exists()


def test_the_end_of_a_task_without_waiters_costs_one_small_statement():
    """Planning the statement that releases dependents takes longer than settling a task."""
    tasks.nothing.using(after=[tasks.echo.enqueue(1)]).enqueue()
    with CaptureQueriesContext(connection) as queries:
        assert release("default", range(10**6, 10**6 + 500)) == 0
    assert [query["sql"].split()[0] for query in queries] == ["SELECT"]


def test_orphaned_waiters_are_searched_page_by_page(claim):
    """Upkeep continues after the last waiter of a page, so a page has to begin with the next one."""
    awaited = [tasks.nothing.enqueue() for _ in range(4)]
    for each in awaited:
        tasks.echo.using(after=[each]).enqueue(1)
    [first, *_] = claim(1)
    settle("default", [(first, Succeeded())], first.worker)
    execute_sql("DELETE FROM django_pglock_task WHERE id = %s", [int(awaited[1].id)])
    found, last = [], 0
    while page := orphaned_waiters("default", last, limit=2):
        assert len(page) == 2
        found += page
        last = page[-1][0]
    ids = list(Waiter.objects.order_by("id").values_list("id", flat=True))
    assert [id_ for id_, _ in found] == ids
    assert [orphan for _, orphan in found] == [first.id, int(awaited[1].id), None, None]


def test_only_a_locked_row_is_released_by_a_second_statement(claim, monkeypatch):
    first = tasks.echo.enqueue(1)
    tasks.nothing.using(after=[first]).enqueue()
    attempts = []

    def refuse(using, statement, *values, **options):
        if statement not in (RELEASE, RELEASE_UNLOCKED):
            return run(using, statement, *values, **options)
        attempts.append(statement)
        raise OperationalError("the server is shutting down")

    monkeypatch.setattr(release_module, "run", refuse)
    with pytest.raises(OperationalError, match="shutting down"):
        release("default", [int(first.id)])
    assert len(attempts) == 1


def test_one_statement_looks_up_the_tasks_of_a_thousand_waiters():
    ids = [int(result.id) for result in results_of(1000)]
    with CaptureQueriesContext(connection) as queries:
        assert ended("default", [*ids, 10**15]) == [(10**15, False)]
        noted = write_waiters("default", ids, instead_of=[])
        assert sorted(noted) == sorted(ids)
        assert write_waiters("default", [], instead_of=list(noted.values())) == {}
    assert len(queries) == 3
    assert not Waiter.objects.exists()


def test_a_row_in_deletion_causes_no_wait():
    [result] = results_of(1)
    [earlier] = write_waiters("default", [int(result.id)], instead_of=[]).values()
    with closing(dedicated_connection("default")) as other, other.cursor() as cursor, transaction.atomic():
        cursor.execute("BEGIN")
        cursor.execute("SELECT FROM django_pglock_waiter WHERE id = %s FOR UPDATE", [earlier])
        with connection.cursor() as mine:
            mine.execute("SET LOCAL lock_timeout = '1s'")
        assert list(write_waiters("default", [int(result.id)], instead_of=[earlier])) == [int(result.id)]
    assert Waiter.objects.filter(pk=earlier).exists()
