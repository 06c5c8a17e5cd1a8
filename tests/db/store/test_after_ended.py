"""Tasks that run after others have ended, whatever came of them, and the results that they read."""

from __future__ import annotations

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_pglock import enqueue_many
from django_pglock.errors import TaskOptionError
from django_pglock.models import Task, Waiter
from django_pglock.store.outcome import Cancelled, Failed, Retried, Succeeded
from django_pglock.store.release import orphaned_waiters, release
from django_pglock.tasks.compat import TaskResultDoesNotExist
from tests.db.store.endings import FAILURE, settle_one, statuses
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("outcome", [Succeeded(), Failed(FAILURE), Cancelled(FAILURE)])
def test_a_task_becomes_ready_when_the_last_of_them_has_ended_whatever_came_of_it(claim, outcome):
    parts = [tasks.echo.enqueue(1), tasks.echo.enqueue(2)]
    tasks.nothing.using(after_ended=parts).enqueue()
    one, two = claim(2)
    settle_one(one, outcome)
    assert statuses()[-1] == "BLOCKED"
    settle_one(two, Succeeded())
    assert statuses()[-1] == "READY"


def test_a_part_that_waits_for_its_retry_has_not_ended(claim):
    tasks.nothing.using(after_ended=[tasks.echo.enqueue(1)]).enqueue()
    settle_one(claim()[0], Retried(FAILURE, 60))
    assert statuses() == ["SCHEDULED", "BLOCKED"]


@pytest.mark.parametrize("verb", ["cancel", "delete"])
def test_a_part_that_is_ended_by_hand_has_ended(verb):
    part = tasks.echo.enqueue(1)
    tasks.nothing.using(after_ended=part).enqueue()
    getattr(Task.objects.filter(pk=part.id), verb)()
    release("default", [each for _, each in orphaned_waiters("default", 0) if each is not None])
    assert statuses()[-1] == "READY"


@pytest.mark.parametrize("fails", ["the one that has to succeed", "the other one"])
def test_both_options_together_wait_for_each_in_its_way(claim, fails):
    strict, loose = tasks.echo.enqueue(1), tasks.echo.enqueue(2)
    tasks.nothing.using(after=strict, after_ended=[loose, strict]).enqueue()
    outcomes = (
        [Failed(FAILURE), Succeeded()] if fails == "the one that has to succeed" else [Succeeded(), Failed(FAILURE)]
    )
    for each, outcome in zip(claim(2), outcomes, strict=True):
        settle_one(each, outcome)
    assert statuses()[-1] == ("CANCELLED" if fails == "the one that has to succeed" else "READY")


@pytest.mark.parametrize("option", ["after", "after_ended"])
def test_an_empty_list_waits_for_nothing(option):
    tasks.nothing.using(**{option: []}).enqueue()
    assert statuses() == ["READY"]


def test_a_task_does_not_wait_for_one_that_had_ended_before(claim):
    part = tasks.echo.enqueue(1)
    settle_one(claim()[0], Failed(FAILURE))
    tasks.nothing.using(after_ended=part).enqueue()
    assert statuses() == ["FAILED", "READY"]


def test_a_missing_task_is_refused_by_the_name_of_the_option():
    with pytest.raises(TaskOptionError, match=r"^after_ended of .* does not exist: 99\.$"):
        tasks.nothing.using(after_ended=99).enqueue()
    assert not Task.objects.exists()


def test_parts_are_kept_until_the_waiting_task_has_ended(claim):
    parts = enqueue_many(tasks.echo.using(keep_result=0), [{"value": 1}, {"value": 2}])
    final = tasks.nothing.using(after_ended=parts).enqueue()
    for each in claim(2):
        settle_one(each, Succeeded())
    orphaned_waiters("default", 0)
    assert Task.objects.prune() == 0, "the waiting task has not run yet"
    settle_one(claim()[0], Succeeded())
    assert Task.objects.prune() == 0, "the upkeep has not come by yet"
    orphaned_waiters("default", 0)
    assert Task.objects.prune() == 2
    assert list(Task.objects.values_list("pk", flat=True)) == [int(final.id)]
    assert not Waiter.objects.exists()


def test_a_waiting_task_that_is_retried_keeps_its_parts_again(claim):
    part = tasks.echo.using(keep_result=0).enqueue(1)
    tasks.nothing.using(after_ended=part).enqueue()
    settle_one(claim()[0], Failed(FAILURE))
    settle_one(claim()[0], Failed(FAILURE))
    orphaned_waiters("default", 0)
    assert Task.objects.prune() == 0, "it may be retried"
    assert Task.objects.exclude(pk=part.id).retry() == 1
    assert statuses() == ["FAILED", "READY"]
    assert Task.objects.prune() == 0
    settle_one(claim()[0], Succeeded())
    orphaned_waiters("default", 0)
    assert Task.objects.prune() == 1


def test_a_part_that_is_retried_with_the_waiting_task_is_waited_for_again(claim):
    part = tasks.echo.enqueue(1)
    tasks.nothing.using(after_ended=part).enqueue()
    settle_one(claim()[0], Failed(FAILURE))
    settle_one(claim()[0], Failed(FAILURE))
    assert Task.objects.all().retry() == 2
    assert statuses() == ["READY", "BLOCKED"]
    settle_one(claim()[0], Succeeded())
    assert statuses() == ["SUCCESSFUL", "READY"]


def test_a_part_that_is_retried_after_the_waiting_task_began_changes_nothing(claim):
    part = tasks.echo.enqueue(1)
    tasks.nothing.using(after_ended=part).enqueue()
    settle_one(claim()[0], Failed(FAILURE))
    [final] = claim()
    Task.objects.filter(pk=part.id).retry()
    settle_one(claim()[0], Succeeded())
    assert statuses() == ["SUCCESSFUL", "RUNNING"]
    settle_one(final, Succeeded())
    assert statuses() == ["SUCCESSFUL", "SUCCESSFUL"]


def test_parts_that_end_at_once_are_all_counted(claim, in_threads):
    parts = enqueue_many(tasks.echo, [{"value": number} for number in range(8)])
    tasks.nothing.using(after_ended=parts).enqueue()
    claims = claim(8)
    in_threads(lambda number: settle_one(claims[number], Failed(FAILURE)), 8)
    assert statuses()[-1] == "READY"


def test_a_part_can_end_while_the_waiting_task_is_enqueued(claim, in_threads):
    part = tasks.echo.using(keep_result=0).enqueue(1)
    with transaction.atomic():
        tasks.nothing.using(after_ended=part).enqueue()
        in_threads(lambda _: settle_one(claim()[0], Failed(FAILURE)), 1)
        assert in_threads(lambda _: Task.objects.prune(), 1) == [0]
    assert statuses() == ["FAILED", "READY"]


def test_results_come_in_the_order_of_the_ids_by_one_query(claim):
    good, bad, new = tasks.echo.enqueue(1), tasks.echo.enqueue(2), tasks.echo.enqueue(3)
    one, two = claim(2)
    settle_one(one, Succeeded(result="7"))
    settle_one(two, Failed(FAILURE))
    with CaptureQueriesContext(
        connection,
    ) as queries:
        found = Task.objects.results([new, bad.id, int(good.id)])
    assert len(queries) == 1
    assert [each.id for each in found] == [new.id, bad.id, good.id]
    assert [each.status for each in found] == ["READY", "FAILED", "SUCCESSFUL"]
    assert found[2].return_value == 7
    assert [error.exception_class_path for error in found[1].errors] == [FAILURE.exception_path]
    for each, alone in zip(found, [new, bad, good], strict=True):
        alone.refresh()
        assert each == alone


def test_a_missing_result_is_named():
    with pytest.raises(TaskResultDoesNotExist, match="There is no task 99"):
        Task.objects.results([99])
