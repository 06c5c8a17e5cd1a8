"""The facts of the overview: what each one counts, and where it stops."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_pglock.admin import overview_facts
from django_pglock.admin.overview import VIEWED
from django_pglock.models import Number, Queue
from django_pglock.store.numbers import count_depths
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
    count_depths("default")
    first = cost()
    for number in range(5):
        make(queue=f"q{number}")
        make("RUNNING", queue=f"q{number}", worker=worker)
        make("FAILED", queue=f"q{number}")
        Queue.objects.pause(f"q{number}")
    count_depths("default", 0.0)
    assert first <= cost() <= MOST_STATEMENTS


def test_the_rate_of_a_queue_is_that_of_its_attempts(facts):
    started_at = timezone.now() - timedelta(minutes=4)
    for kind, count in {"succeeded": 7, "failed": 3, "retried": 20, "READY": 40}.items():
        row = {"seconds": 60, "started_at": started_at, "kind": kind, "count": count, "total": 0, "buckets": []}
        Number.objects.create(queue="mail", task_path="", **row)
    assert facts.rates(["mail", "quiet"]) == {"mail": 2}


def test_running_tasks_are_read_up_to_a_limit(facts, monkeypatch):
    monkeypatch.setattr(overview_facts, "MOST_RUNNING", 3)
    worker = start_worker()
    for queue in ("mail", "mail", "other", "other"):
        make("RUNNING", queue=queue, worker=worker)
    assert [task.queue for task in facts.running] == ["mail", "mail", "other"]
