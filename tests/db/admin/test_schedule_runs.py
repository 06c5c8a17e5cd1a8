"""The history on the page of a schedule."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_pglock import task
from django_pglock.admin.schedule_runs import skipped_between
from django_pglock.models import Attempt, Schedule, Task
from django_pglock.store.schedule_register import register
from django_pglock.store.schedule_tick import enqueue_due
from tests.db.admin.visits import person
from tests.sample import scheduled

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("own_registry")]


LIST = reverse("admin:django_pglock_schedule_changelist")


def tick(at):
    """Make the tick of a given time due and enqueue it. Returns its task."""
    Schedule.objects.update(next_at=at)
    [id_] = enqueue_due("default").tasks
    return Task.objects.get(pk=id_)


@pytest.mark.django_db(transaction=True)
def test_the_page_of_a_schedule_shows_its_last_runs_and_the_ticks_without_a_task(client, own_registry):
    task(every=3600)(scheduled.nightly)
    register("default")
    now = timezone.now()
    runs = [tick(now - timedelta(hours=hours)) for hours in (9, 8, 5)]
    Task.objects.filter(pk=runs[0].pk).update(
        status="SUCCESSFUL", started_at=now, last_attempted_at=now, finished_at=now + timedelta(seconds=1.5)
    )
    Task.objects.filter(pk=runs[1].pk).update(
        status="FAILED", attempts=1, started_at=now, last_attempted_at=now, finished_at=now
    )
    Attempt.objects.create(
        task_id=runs[1].pk, number=1, started_at=now, finished_at=now, outcome="FAILED",
        exception_path="builtins.ValueError", traceback="Traceback\nValueError: no rates",
    )  # fmt: skip
    Schedule.objects.update(next_at=now + timedelta(hours=1))
    url = reverse("admin:django_pglock_schedule_change", args=[runs[0].task_path])

    person(client, "view_schedule")
    assert "Last runs" not in client.get(url).content.decode(), "they are tasks"
    person(client, "view_schedule", "view_task")
    with CaptureQueriesContext(connection) as queries:
        page = client.get(url)
    assert len([each for each in queries if "django_pglock" in each["sql"]]) <= 6
    newest, failed, first = page.context["pglock_runs"]
    assert [run.task.pk for run in (newest, failed, first)] == [each.pk for each in reversed(runs)]
    assert [run.skipped for run in (newest, failed, first)] == ["2", "", ""], "between 8 and 5 hours ago"
    assert page.context["pglock_skipped"] == "5"
    assert (first.took, first.error, failed.error) == ("1.500 s", "", "ValueError: no rates")
    text = page.content.decode()
    for part in (f"#{runs[1].pk}</a>", "ValueError: no rates", "Failed</span>", "that have enqueued no task: 5"):
        assert part in text
    assert "Ready</span>" in client.get(LIST).content.decode(), "the status of the last task"


@pytest.mark.parametrize(
    ("expression", "minutes", "skipped"),
    [
        ("every 60 s", 1, ""),
        ("every 60 s", 3, "2"),
        ("every 60 s", 51, "50"),
        ("every 60 s", 52, "50+"),
        ("every 60 s", 10**6, "50+"),
        ("at full moon", 10**6, ""),
    ],
)
def test_ticks_without_a_task_are_counted_up_to_a_limit(expression, minutes, skipped):
    """Another version of the code may have written an expression that this one cannot read."""
    schedule, now = Schedule(task_path="x", expression=expression, timezone=""), timezone.now()
    assert skipped_between(schedule, now, now + timedelta(minutes=minutes)) == skipped
    assert skipped_between(schedule, None, now) == skipped_between(schedule, now, None) == ""
