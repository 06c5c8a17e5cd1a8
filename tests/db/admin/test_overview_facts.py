"""The facts of the overview: what each one counts, and where it stops."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_pglock.admin import overview_facts
from django_pglock.admin.overview import VIEWED
from django_pglock.models import Queue, TaskHistory
from django_pglock.store.history import ALL, HOUR, MINUTE
from tests.db.admin.visits import make, person, start_worker

pytestmark = pytest.mark.django_db

PAGE = reverse("admin:django_pglock_overview_changelist")
#: The most statements of the page, with those that log the user in.
MOST_STATEMENTS = 24


def test_the_page_sends_the_same_number_of_statements_however_much_there_is(client):
    def cost():
        with CaptureQueriesContext(connection) as queries:
            assert client.get(PAGE).status_code == 200
        return len(queries)

    person(client, *(f"view_{model._meta.model_name}" for model in VIEWED))
    worker = start_worker()
    first = cost()
    for number in range(5):
        make(queue=f"q{number}")
        make("RUNNING", queue=f"q{number}", worker=worker)
        make("FAILED", queue=f"q{number}")
        Queue.objects.pause(f"q{number}")
    assert first <= cost() <= MOST_STATEMENTS


def test_the_rate_of_a_queue_is_the_average_of_the_last_minutes_that_all_workers_have_written(facts, monkeypatch):
    """A worker writes a minute up to a minute after its end, so the newest two would make each queue look slower."""
    now = datetime(2026, 1, 5, 12, 0, 30, tzinfo=timezone.utc)
    monkeypatch.setattr(overview_facts, "timezone", SimpleNamespace(now=lambda: now))
    others = {"snoozed": 0, "wait_seconds": 0, "run_seconds": 0, "wait": [], "run": []}
    counts = {"succeeded": 1, "failed": 20, "cancelled": 300, "retried": 4000, "lost": 50_000}
    for ago in range(10):
        row = {"seconds": MINUTE, "started_at": now - timedelta(minutes=ago, seconds=30), **others}
        mine = {name: count * (2 <= ago < 7) for name, count in counts.items()}
        TaskHistory.objects.create(queue="mail", task_path=ALL, **row, **mine)
        TaskHistory.objects.create(queue="other", task_path=ALL, **row, **counts)
        TaskHistory.objects.create(queue="mail", task_path="of.one.function", **row, **counts)
        TaskHistory.objects.create(queue="mail", task_path=ALL, **{**row, "seconds": HOUR}, **counts)
    assert facts.rates(["mail", "quiet"]) == {"mail": 321}


def test_running_tasks_are_read_up_to_a_limit(facts, monkeypatch):
    monkeypatch.setattr(overview_facts, "MOST_RUNNING", 3)
    worker = start_worker()
    for queue in ("mail", "mail", "other", "other"):
        make("RUNNING", queue=queue, worker=worker)
    assert facts.running_by_queue == {"mail": 2, "other": 1}
