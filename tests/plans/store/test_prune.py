"""Old tasks are found along the key, and a count of them stops."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Task
from tests.plans.reading import analyze, executed, rows_read

pytestmark = pytest.mark.django_db


@pytest.fixture
def few_old_ones(history):
    """Of 20,000 finished tasks, the first hundred are old."""
    first = Task.objects.order_by("pk").values_list("pk", flat=True).first()
    old = Now() - timedelta(days=40)
    Task.objects.filter(pk__lt=first + 100).update(enqueued_at=old, finished_at=old)
    analyze()


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["prune", "--dry-run", "--older-than", "30"], "100 finished tasks would be deleted"),
        (["prune", "--dry-run", "--older-than", "30", "--status", "FAILED"], "0 finished tasks would be deleted"),
        (["list", "--older-than", "30", "--limit", "2"], "SUCCESSFUL"),
        (["list", "--older-than", "90"], "No task matches."),
    ],
)
def test_old_tasks_are_found_without_reading_all_that_are_newer(few_old_ones, arguments, answer):
    """At ten million rows, the list took 24 seconds and the dry run 65."""
    with CaptureQueriesContext(connection) as queries:
        call_command("locktasks", *arguments, stdout=(out := StringIO()))
    assert answer in out.getvalue()
    assert sum(rows_read(executed(each["sql"])) for each in queries if '"django_pglock_task"' in each["sql"]) <= 400
