"""Where in the ids of all tasks something begins."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from django.db import connection

from django_pglock.models import Task
from django_pglock.store.id_range import ROUGHLY, above_succeeded, first_since
from tests.plans.reading import insert

pytestmark = pytest.mark.django_db

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def spread(*ids):
    """Make a task for each id, enqueued so many seconds after the beginning."""
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO django_pglock_task (id, queue, task_path, backend, enqueued_at)
               OVERRIDING SYSTEM VALUE
               SELECT id, 'q', 'a.b', 'default', %s + id * interval '1 second' FROM unnest(%s::bigint[]) AS id""",
            [BEGAN, list(ids)],
        )


@pytest.mark.parametrize("ids", [range(1, 9000), [*range(1, 1000), *range(500_000, 500_100)], [7], []])
def test_a_moment_is_found_among_ids_with_gaps(ids):
    spread(*ids)
    for second in (0, 7, 500, 4321, 500_050, 10**6):
        found = first_since("default", BEGAN + timedelta(seconds=second))
        assert found < next((each for each in ids if each >= second), 10**9), "no task since then is left out"
        early = [each for each in ids if each < second]
        assert all(each < found + ROUGHLY for each in early), "nor one before"


@pytest.mark.parametrize(("done", "waiting"), [(5000, 9000), (100, 30_000), (1, 1)])
def test_the_tasks_that_have_succeeded_are_below(done, waiting):
    insert("SUCCESSFUL", done)
    insert("READY", waiting)
    newest = Task.objects.filter(status="SUCCESSFUL").latest("pk").pk
    above = above_succeeded("default")
    if waiting < ROUGHLY:
        assert above is None or above > newest
    else:
        assert newest < above <= newest + ROUGHLY


def test_nothing_is_skipped_if_the_newest_tasks_have_succeeded():
    assert above_succeeded("default") is None, "there is no task"
    insert("READY", 5000)
    insert("SUCCESSFUL", 5000)
    assert above_succeeded("default") is None
