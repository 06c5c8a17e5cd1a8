"""The admin page of workers."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Worker
from tests.db.admin.visits import make, person, start_worker, url

pytestmark = pytest.mark.django_db


def test_workers_are_listed_with_what_they_run_in_one_query(client):
    person(client, "view_worker")
    worker = start_worker("web1:42")
    make("RUNNING", worker=worker)
    with CaptureQueriesContext(connection) as queries:
        page = client.get(url("worker")).content.decode()
    assert "web1:42" in page
    assert "mail" in page
    assert (
        sum('FROM "django_pglock_worker"' in each["sql"] and "COUNT" not in each["sql"][:20] for each in queries) == 1
    )
    assert client.get(url("worker", "change", worker)).status_code == 200


@pytest.mark.parametrize(("runs", "state"), [(True, "working"), (False, "idle")])
def test_a_worker_that_runs_a_task_is_not_idle_although_it_finds_no_other(client, runs, state):
    person(client, "view_worker")
    worker = start_worker("web1:42")
    Worker.objects.filter(pk=worker).update(is_sleeping=True)
    if runs:
        make("RUNNING", worker=worker)
    assert f">{state}<" in client.get(url("worker")).content.decode()


def test_a_worker_whose_last_heartbeat_is_beyond_the_limit_is_marked(client, settings):
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 40.0}
    person(client, "view_worker")
    worker = start_worker("web1:42")
    for seconds, is_marked in ((300, False), (500, True)):
        Worker.objects.filter(pk=worker).update(heartbeat_at=Now() - timedelta(seconds=seconds))
        assert (">no heartbeat<" in client.get(url("worker")).content.decode()) == is_marked


def test_workers_have_pages_whatever_the_style_of_intervals_is(client):
    person(client, "view_worker")
    worker = start_worker("web1:42")
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL IntervalStyle = 'sql_standard'")
    page = client.get(url("worker"))
    assert re.search(r"\d+\.\d s ago", page.content.decode())
    assert client.get(url("worker", "change", worker)).status_code == 200
