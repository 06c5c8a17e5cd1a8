"""A worker whose tables are changed while it works: it waits, and loses nothing."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock.models import Task
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def execute(sql, *values):
    with connection.cursor() as cursor:
        cursor.execute(sql, values or None)


@pytest.fixture
def away():
    """Take the table of tasks away, as a migration does that makes it anew, and bring it back."""
    execute("ALTER TABLE django_pglock_task RENAME TO elsewhere")
    back = [lambda: execute("ALTER TABLE elsewhere RENAME TO django_pglock_task")]
    yield lambda: back.pop()()
    while back:
        back.pop()()


def test_an_outcome_waits_until_the_table_is_back(worker, eventually, request):
    """It is not the row's fault that it cannot be written, so the task does not fail for it."""
    running = worker()
    tasks.note_and_sleep.enqueue("ends meanwhile", 0.3)
    eventually(lambda: Effect.objects.exists())
    bring_back = request.getfixturevalue("away")
    for part in (running.settler, running.fetcher, running.upkeep):
        eventually(lambda: part._failures > 1, why=f"the {part.name} has not tried again")  # noqa: B023
    bring_back()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists())
    assert Task.objects.get().attempts == 1
    result = tasks.echo.enqueue("still here")
    eventually(lambda: Task.objects.filter(pk=result.id, status="SUCCESSFUL").exists())
