"""Pruning walks the key and the index of dates."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Task
from django_pglock.store import prune
from django_pglock.store.prune import NEXT_WINDOW, PRUNE, expired, locking_old, outdated
from django_pglock.store.statements import filled
from tests.plans.reading import analyze, executed, nodes, plan_of, reads, rows_read

pytestmark = pytest.mark.django_db


def pruning(selection, batch):
    """Yield the two statements; each has to be executed before the next one is taken."""
    lock, values = locking_old(selection, batch)
    yield lock, values
    with connection.cursor() as cursor:
        cursor.execute(filled(lock), values)
    yield PRUNE, ()


@pytest.mark.parametrize("batch", [1, 500, 5000])
def test_pruning_walks_the_key_and_the_index_of_dates(history, batch):
    rows = Task.objects.all()
    Task.objects.filter(status="SUCCESSFUL", queue="q1").update(expires_at=Now(), keep_result=1)
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO django_pglock_attempt
                      (task_id, number, started_at, finished_at, outcome, exception_path, traceback)
               SELECT id, 1, now(), now(), 'FAILED', '', '' FROM django_pglock_task"""
        )
        cursor.execute("ANALYZE django_pglock_task, django_pglock_attempt")
        cursor.execute("SELECT min(id) FROM django_pglock_task")
        [first] = cursor.fetchone()
    assert reads(plan_of(filled(NEXT_WINDOW), (0.0, first, batch))) == {("Index Scan", "django_pglock_task_pkey")}
    window = outdated(rows, {"SUCCESSFUL": 7, "FAILED": 30}).filter(pk__gt=first, pk__lte=first + batch)
    for selection, index in ((window, "django_pglock_task_pkey"), (expired(rows), "pglock_task_expires")):
        used = set()
        for sql, values in pruning(selection, batch):
            plan = plan_of(filled(sql), values)
            assert "Seq Scan" not in {kind for kind, _ in reads(plan)}, json.dumps(plan, indent=1)
            used |= {each["Index Name"] for each in nodes(plan) if "Index Name" in each}
        assert used >= {index, "pglock_attempt_number"}


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
        (["prune", "--dry-run", "--older-than", "30"], "100 tasks would be deleted."),
        (["prune", "--dry-run", "--older-than", "30", "--status", "FAILED"], "0 tasks would be deleted."),
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


def test_a_dry_run_stops_counting(few_old_ones, monkeypatch):
    monkeypatch.setattr(prune, "MOST_COUNTED", 10)
    with CaptureQueriesContext(connection) as queries:
        assert Task.objects.prune(dry_run=True, older_than=30) == 11
    counts = [each["sql"] for each in queries if each["sql"].startswith("SELECT COUNT(*)")]
    assert counts
    assert all("LIMIT 11)" in sql for sql in counts)
