"""What was cancelled because of a task is retried with it, and the parts of a task are cancelled with it."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_pglock import enqueue_many
from django_pglock.models import Task, Waiter
from django_pglock.store.bulk import Work, change_batch
from django_pglock.store.dependants import cancelled_because_of, unfinished_parts
from django_pglock.store.outcome import Failed, Succeeded
from tests.db.store.endings import FAILURE, settle_one, statuses
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def rows(*results):
    return Task.objects.filter(pk__in=[each.id for each in results])


def failed_fan_in(claim, *, chain=0, parts=3):
    """Return the parts of a final task, of which all have failed, and the final task and those after it, cancelled."""
    asked = [tasks.echo.enqueue(number) for number in range(parts)]
    after = [tasks.echo.using(after=asked).enqueue("final")]
    for _ in range(chain):
        after.append(tasks.echo.using(after=[after[-1]]).enqueue("next"))
    for each in claim(parts):
        settle_one(each, Failed(FAILURE))
    assert {*statuses()[parts:]} == {"CANCELLED"}
    return asked, after


def test_what_was_cancelled_because_of_a_task_waits_for_it_again(claim):
    [part], _ = failed_fan_in(claim, chain=2, parts=1)
    assert rows(part).retry(dependants=True) == 4
    assert statuses() == ["READY", "BLOCKED", "BLOCKED", "BLOCKED"]
    for _ in range(4):
        settle_one(claim()[0], Succeeded())
    assert statuses() == ["SUCCESSFUL"] * 4
    assert not Waiter.objects.exists()


def test_without_the_option_only_the_task_is_retried(claim):
    [part], _ = failed_fan_in(claim, parts=1)
    assert rows(part).retry() == 1
    assert statuses() == ["READY", "CANCELLED"]


def test_a_task_of_which_another_dependency_has_failed_stays_and_is_found_by_the_retry_of_that_one(claim):
    [first, second, third], [final, _] = failed_fan_in(claim, chain=1)
    found = cancelled_because_of("default", [int(first.id)])
    assert found.ids == []
    assert found.remark == (
        "2 tasks stay cancelled, because they were to run after other tasks that did not succeed: "
        f"#{second.id}, #{third.id}. Retry these as well."
    )
    assert rows(first).retry(dependants=True) == 1
    assert statuses() == ["READY", "FAILED", "FAILED", "CANCELLED", "CANCELLED"]
    final.refresh()
    assert f"after task {second.id}, " in final.errors[0].traceback
    assert rows(second, third).retry(dependants=True) == 4
    assert statuses() == ["READY"] * 3 + ["BLOCKED"] * 2
    assert rows(final).get().waits_for == 3


def test_a_task_below_two_cancelled_ones_is_retried_with_both(claim):
    """Whichever of the two is found first."""
    root = tasks.echo.enqueue(0)
    left, right = (tasks.echo.using(after=[root]).enqueue(side) for side in "lr")
    middle = tasks.echo.using(after=[right]).enqueue("m")
    bottom = tasks.echo.using(after=[left, middle]).enqueue("b")
    settle_one(claim()[0], Failed(FAILURE))
    assert cancelled_because_of("default", [int(root.id)]).ids == [
        int(each.id) for each in (left, right, middle, bottom)
    ]
    assert rows(root).retry(dependants=True) == 5


def test_a_task_that_a_person_has_cancelled_stays(claim):
    [part], [final] = failed_fan_in(claim, parts=1)
    rows(part).retry(dependants=True)
    rows(final).cancel()
    settle_one(claim()[0], Failed(FAILURE))
    assert statuses() == ["FAILED", "CANCELLED"]
    assert rows(part).retry(dependants=True) == 1


def test_two_people_who_retry_two_parts_at_once_run_the_final_task_once(claim, in_threads):
    """Both parts have failed. Each person repairs one, and neither sees the other's uncommitted retry."""
    [first, second], [final] = failed_fan_in(claim, parts=2)
    with transaction.atomic():
        rows(first).retry(dependants=True)
        assert in_threads(lambda _: rows(second).retry(dependants=True), 1) == [1]
    assert statuses() == ["READY", "READY", "CANCELLED"]
    assert cancelled_because_of("default", [int(first.id), int(second.id)]).ids == [int(final.id)]


def test_two_people_who_retry_the_same_task_retry_it_once(claim, in_kept_threads):
    [part], _ = failed_fan_in(claim, chain=3, parts=1)
    assert sum(in_kept_threads(lambda _: rows(part).retry(dependants=True), 4)) == 5
    assert statuses() == ["READY"] + ["BLOCKED"] * 4
    assert Waiter.objects.count() == 4


def test_a_group_of_failures_is_retried_with_its_dependants_in_batches(claim):
    """The final task waits for two parts, which are in two batches."""
    failed_fan_in(claim, parts=2)
    tasks.nothing.enqueue()
    [own] = claim()
    group = Task.objects.filter(status="FAILED").values_list("fingerprint", flat=True)[0]
    work = Work("retry", fingerprint=group, with_related=True)
    before = Task.objects.get(pk=own.id).enqueued_at
    for done in (1, 2):
        batch = change_batch("default", work, before=before, limit=1, by=own.id, attempt=own.attempt)
        assert batch.done == done
    assert statuses()[:3] == ["READY", "READY", "BLOCKED"]


def test_unfinished_parts_are_cancelled_with_the_only_task_that_waits_for_them(claim):
    shared, own = tasks.echo.enqueue(1), tasks.echo.enqueue(2)
    middle = tasks.echo.using(after=[own]).enqueue(3)
    final = tasks.echo.using(after=[shared], after_ended=[middle]).enqueue(4)
    other = tasks.echo.using(after=[shared]).enqueue(5)
    assert unfinished_parts("default", [int(final.id)]).ids == [int(own.id), int(middle.id)]
    assert rows(final).cancel(parts=True) == 3
    assert {each.id: each.status for each in Task.objects.all()} == {
        **{int(each.id): "CANCELLED" for each in (own, middle, final)},
        int(shared.id): "READY",
        int(other.id): "BLOCKED",
    }


def test_a_part_for_whose_end_a_process_waits_is_not_offered():
    part = tasks.echo.enqueue(1)
    final = tasks.echo.using(after=[part]).enqueue(2)
    Waiter.objects.create(awaited=int(part.id))
    assert unfinished_parts("default", [int(final.id)]).ids == []


def test_a_long_chain_takes_a_statement_for_each_level(claim, django_assert_num_queries):
    [part], after = failed_fan_in(claim, chain=20, parts=1)
    enqueue_many(tasks.nothing, [{} for _ in range(3)])
    with django_assert_num_queries(len(after) + 1):
        assert len(cancelled_because_of("default", [int(part.id)]).ids) == len(after)
