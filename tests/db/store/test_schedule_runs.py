"""The last runs of a schedule: a chain of the tasks that its ticks have enqueued."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now

from django_pglock import task
from django_pglock.models import Schedule, Task
from django_pglock.store.schedule_register import register
from django_pglock.store.schedule_runs import last_runs
from django_pglock.store.schedule_tick import enqueue_due
from tests.sample import scheduled

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


@pytest.fixture
def nightly():
    task(every=3600)(scheduled.nightly)
    register("default")
    return Schedule.objects.get()


def tick():
    """Make one tick due and enqueue it. Returns the id of its task."""
    Schedule.objects.update(next_at=Now() - timedelta(seconds=1))
    [id_] = enqueue_due("default").tasks
    return id_


def ids(schedule, **limit):
    schedule.refresh_from_db()
    return [each.pk for each in last_runs("default", schedule.pk, schedule.last_task, **limit)]


def test_the_runs_are_those_of_the_ticks_the_newest_first(nightly, django_assert_max_num_queries):
    assert ids(nightly) == []
    first, second = tick(), tick()
    Schedule.objects.all().run_now()
    third = tick()
    with django_assert_max_num_queries(3):
        assert [each.pk for each in last_runs("default", nightly.pk, third)] == [third, second, first]
    assert ids(nightly) == [third, second, first]
    assert ids(nightly, limit=2) == [third, second]


def test_the_chain_ends_at_a_task_that_is_deleted(nightly):
    ticks = [tick() for _ in range(4)]
    assert ids(nightly, limit=3) == ticks[:0:-1]
    Task.objects.filter(pk=ticks[1]).delete()
    assert ids(nightly) == [ticks[3], ticks[2]]
    Task.objects.filter(pk=ticks[3]).delete()
    assert ids(nightly) == []


@pytest.mark.parametrize("text", ["x", -1, 1.5, True, None, [], {}, "9" * 40, "own", "later", "other"])
def test_an_invalid_previous_run_ends_the_list_of_runs(nightly, text):
    first = tick()
    other = Task.objects.create(queue="default", backend="default", task_path="some.other")
    last = tick()
    named = {"own": last, "later": last + 10, "other": other.pk}
    Task.objects.filter(pk=last).update(meta={"previous_run": named[text] if str(text) in named else text})
    assert ids(nightly) == [last]
    Task.objects.filter(pk=last).update(meta=[])
    assert ids(nightly) == [last]
    Task.objects.filter(pk=last).update(meta={"previous_run": str(first)})
    assert ids(nightly) == [last, first]


def test_an_id_that_is_not_smaller_ends_the_chain(nightly):
    first, other = tick(), tick()
    last = tick()
    Task.objects.filter(pk=last).update(meta={"previous_run": first})
    Task.objects.filter(pk=first).update(meta={"previous_run": other})
    assert ids(nightly) == [last, first]


def test_the_first_task_of_the_table_is_found(nightly):
    Task.objects.create(pk=7, queue="default", backend="default", task_path=nightly.pk)
    last = tick()
    Task.objects.filter(pk=last).update(meta={"previous_run": 7})
    assert ids(nightly) == [last, 7]
