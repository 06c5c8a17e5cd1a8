"""The status of the last task of a schedule, wherever the task is."""

from __future__ import annotations

import pytest

from django_pglock.models import Schedule, Task
from django_pglock.store.schedule_status import set_last_status
from tests.db.store.test_prune import make

pytestmark = pytest.mark.django_db(transaction=True)
DATES = {"expression": "every 60 s", "timezone": "", "next_at": "2030-01-01T00:00:00Z"}


def schedules(*last_tasks):
    return [
        Schedule.objects.create(task_path=f"a.{place}", last_task=each, **DATES)
        for place, each in enumerate(last_tasks)
    ]


def test_the_last_status_of_a_schedule_is_that_of_its_task_or_none(django_assert_num_queries):
    failed, ready = make("FAILED", days=0), Task.objects.create(queue="a", backend="default", task_path="a.b")
    rows = schedules(failed.pk, ready.pk, ready.pk + 1, None)
    with django_assert_num_queries(1):
        set_last_status("default", rows[:2])
    set_last_status("default", rows)
    assert [each.last_status for each in rows] == ["FAILED", "READY", None, None]
    with django_assert_num_queries(0):
        set_last_status("default", rows[3:])
