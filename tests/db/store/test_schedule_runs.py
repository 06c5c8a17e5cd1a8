"""The last runs of a schedule: a chain of the tasks that its ticks have enqueued."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now

from django_pglock import task
from django_pglock.models import Schedule, Task
from django_pglock.store.schedule import enqueue_due, register
from django_pglock.store.schedule_runs import last_runs
from tests.sample import scheduled

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


@pytest.fixture
def nightly():
    task(every=3600)(scheduled.nightly)
    register("default")
    return Schedule.objects.get()


def tick():
    """Let one tick come. Returns the id of its task."""
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
    with django_assert_max_num_queries(2):
        assert [each.pk for each in last_runs("default", nightly.pk, third)] == [third, second, first]
    assert ids(nightly) == [third, second, first]
    assert ids(nightly, limit=2) == [third, second]


def test_the_chain_ends_at_a_task_that_is_deleted(nightly):
    ticks = [tick() for _ in range(4)]
    Task.objects.filter(pk=ticks[1]).delete()
    assert ids(nightly) == [ticks[3], ticks[2]]
    Task.objects.filter(pk=ticks[3]).delete()
    assert ids(nightly) == []


@pytest.mark.parametrize("text", ["x", -1, 1.5, True, None, [], {}, "9" * 40, "own", "later", "other"])
def test_what_another_program_has_written_ends_the_chain(nightly, text):
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
