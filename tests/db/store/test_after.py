"""Tasks that run after others."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models.functions import Now

from django_pglock import enqueue_many
from django_pglock.errors import TaskOptionError
from django_pglock.models import Task, Waiter
from django_pglock.store.outcome import Cancelled, Failed, Retried, Succeeded
from django_pglock.store.release import orphaned_waiters, promote, release
from django_pglock.tasks.compat import TaskResultStatus
from tests.db.store.endings import FAILURE, settle_one, statuses
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_task_becomes_ready_when_the_last_of_its_dependencies_has_succeeded(claim):
    first, second = tasks.echo.enqueue(1), tasks.echo.enqueue(2)
    tasks.nothing.using(after=[first, second.id, int(second.id)]).enqueue()
    assert statuses() == ["READY", "READY", "BLOCKED"]
    one, two = claim(2)
    settle_one(one, Succeeded())
    assert statuses() == ["SUCCESSFUL", "RUNNING", "BLOCKED"]
    settle_one(two, Succeeded())
    assert statuses() == ["SUCCESSFUL", "SUCCESSFUL", "READY"]
    assert not Waiter.objects.exists()


def test_a_task_stays_blocked_while_its_dependency_waits_for_a_retry(claim):
    tasks.nothing.using(after=[tasks.echo.enqueue(1)]).enqueue()
    settle_one(claim()[0], Retried(FAILURE, 60))
    assert statuses() == ["SCHEDULED", "BLOCKED"]


@pytest.mark.parametrize("outcome", [Failed(FAILURE), Cancelled(FAILURE)])
def test_a_failure_cancels_all_direct_and_indirect_dependents(claim, outcome):
    first = tasks.echo.enqueue(1)
    second = tasks.nothing.using(after=[first]).enqueue()
    third = tasks.nothing.using(after=[second]).enqueue()
    other = tasks.echo.enqueue(2)
    tasks.nothing.using(after=[third, other]).enqueue()
    settle_one(claim()[0], outcome)
    assert statuses()[1:] == ["CANCELLED", "CANCELLED", "READY", "CANCELLED"]
    third.refresh()
    assert third.status == TaskResultStatus.FAILED
    assert [error.exception_class_path for error in third.errors] == ["django_pglock.errors.DependencyFailed"]
    assert f"task {second.id}" in third.errors[0].traceback


@pytest.mark.parametrize("verb", ["cancel", "delete"])
def test_ending_a_task_by_hand_cancels_the_tasks_after_it(verb):
    first = tasks.echo.enqueue(1)
    tasks.nothing.using(after=[first]).enqueue()
    getattr(Task.objects.filter(pk=first.id), verb)()
    release("default", [each for _, each in orphaned_waiters("default", 0) if each is not None])
    assert statuses()[-1] == "CANCELLED"


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_finished_task_is_kept_until_its_dependent_is_committed(claim, in_threads, is_finished):
    """Before the commit, other sessions cannot see the dependent. The task can be claimed and can end meanwhile."""
    first = tasks.echo.using(keep_result=0).enqueue(1)

    def end():
        [mine] = claim()
        settle_one(mine, Succeeded())

    if is_finished:
        end()
    with transaction.atomic():
        tasks.nothing.using(after=[first]).enqueue()
        if not is_finished:
            in_threads(lambda _: end(), 1)
        assert in_threads(lambda _: Task.objects.prune(), 1) == [0]
    assert statuses() == ["SUCCESSFUL", "READY"]
    assert Task.objects.prune() == 1


def test_a_failed_task_is_kept_until_the_retry_of_its_dependent_is_committed(claim, in_threads):
    first = tasks.echo.using(keep_result=0).enqueue(1)
    second = tasks.nothing.using(after=[first]).enqueue()
    settle_one(claim()[0], Failed(FAILURE))
    with transaction.atomic():
        assert Task.objects.filter(pk=second.id).retry() == 1
        assert in_threads(lambda _: Task.objects.prune(), 1) == [0]
    assert statuses() == ["FAILED", "CANCELLED"], "it waits for a task that has failed"
    assert Task.objects.filter(pk=first.id).prune() == 1


@pytest.mark.parametrize("options", [{}, {"fair": "{value}"}, {"lock": "echo:{value}"}])
def test_a_predecessor_can_be_claimed_while_successors_are_enqueued(worker, eventually, options):
    first = tasks.echo.using(**options).enqueue(1)
    with transaction.atomic():
        tasks.nothing.using(after=[first]).enqueue()
        worker()
        eventually(lambda: Task.objects.get(pk=first.id).status == "SUCCESSFUL")


@pytest.mark.parametrize("runs", [True, False])
def test_a_predecessor_can_be_cancelled_while_successors_are_enqueued(claim, in_threads, runs):
    first = tasks.echo.enqueue(1)
    if runs:
        claim()
    with transaction.atomic():
        tasks.nothing.using(after=[first]).enqueue()
        assert in_threads(lambda _: Task.objects.filter(pk=first.id).cancel(), 1) == [1]


def test_a_predecessor_can_be_promoted_while_successors_are_enqueued(claim, in_threads):
    second = tasks.nothing.using(after=[tasks.echo.enqueue(1)]).enqueue()
    [first] = claim()
    with transaction.atomic():
        tasks.nothing.using(after=[second]).enqueue()
        in_threads(lambda _: settle_one(first, Succeeded()), 1)
        assert Task.objects.get(pk=second.id).status == "READY"


def test_a_dependent_waits_also_for_its_lock_key_and_its_date(claim):
    first = tasks.echo.enqueue(1)
    keyed.step.using(after=[first], run_after=timedelta(hours=1)).enqueue(1)
    keyed.step.using(after=[first]).enqueue(1)
    keyed.step.using(after=[first]).enqueue(1)
    settle_one(claim()[0], Succeeded())
    assert statuses()[1:] == ["SCHEDULED", "READY", "BLOCKED"]
    Task.objects.filter(status="SCHEDULED").update(run_after=Now())
    promote("default")
    assert statuses()[1:] == ["BLOCKED", "READY", "BLOCKED"]


def test_after_refuses_a_task_that_does_not_exist():
    with pytest.raises(TaskOptionError, match="999999999"):
        tasks.nothing.using(after=["999999999"]).enqueue()
    with pytest.raises(TaskOptionError, match="does not exist: 0"):
        tasks.nothing.using(after=0).enqueue()


def test_many_tasks_wait_for_one_and_one_waits_for_many(worker, eventually):
    worker()
    with transaction.atomic():
        first = tasks.echo.enqueue(0)
        ids = enqueue_many(tasks.echo.using(after=[first]), range(200))
        last = tasks.echo.using(after=ids).enqueue(1)
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 202)
    rows = {row.pk: row for row in Task.objects.all()}
    assert all(rows[int(id_)].started_at >= rows[int(first.id)].finished_at for id_ in ids)
    assert rows[int(last.id)].started_at >= max(rows[int(id_)].finished_at for id_ in ids)


def test_a_dependent_becomes_ready_when_its_dependencies_end_at_the_same_time(in_kept_threads, claim):
    """If two dependencies end at the same time, one of them must release the dependent."""
    for _ in range(10):
        results = [tasks.echo.enqueue(number) for number in range(8)]
        child = tasks.nothing.using(after=results).enqueue()
        claims = claim(8)
        in_kept_threads(lambda number, claims=claims: settle_one(claims[number], Succeeded()), 8)
        assert Task.objects.get(pk=child.id).status == "READY"
        Task.objects.all().delete()


def test_a_dependent_enqueued_while_its_dependency_ends_becomes_ready(in_kept_threads, claim):
    for _ in range(20):
        first = tasks.echo.enqueue(1)
        [mine] = claim()

        def work(number, first=first, mine=mine):
            if number:
                settle_one(mine, Succeeded())
            else:
                tasks.nothing.using(after=[first]).enqueue()

        in_kept_threads(work, 2)
        assert statuses() == ["SUCCESSFUL", "READY"]
        Task.objects.all().delete()
