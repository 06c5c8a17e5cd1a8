"""The plans of the overview: each statement reads along an index and stops, however long the table is."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_pglock.admin import overview
from django_pglock.store.numbers import count_depths
from tests.db.store.workers import beat
from tests.plans.reading import analyze, executed, insert, nodes, pages_read, reads, rows_read
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db

PAGE = reverse("admin:django_pglock_overview_changelist")
#: Running tasks that are read, and tasks of a queue that are counted.
MOST = 200


@pytest.fixture
def incident(new_table, admin_client, monkeypatch):
    """A long history, and thousands of tasks in each status that the page reads."""
    monkeypatch.setattr(overview, "MOST_RUNNING", MOST)
    monkeypatch.setattr("django_pglock.admin.overview.MOST_COUNTED", MOST)
    worker = uuid4()
    about = {"hostname": "h", "pid": 1, "queues": [], "threads": 1, "is_stopping": False}
    beat("default", worker, name="w", task_paths=[], **about)
    insert("SUCCESSFUL", 20_000)
    for status, options in (
        ("READY", {}), ("READY", {"fair": "tenant"}), ("BLOCKED", {"lock": "key"}), ("FAILED", {}),
        ("SCHEDULED", {"seconds": -60}),
    ):  # fmt: skip
        insert(status, 3000, **options)
    for each in (worker, uuid4()):
        insert("RUNNING", 2 * MOST, worker=each)
    execute_sql("UPDATE django_pglock_task SET enqueued_at = now() - interval '1 hour' WHERE status = 'BLOCKED'")
    analyze()
    return admin_client


def test_no_statement_reads_more_than_it_shows(incident):
    # One worker counts for all pages.
    count_depths("default")
    with CaptureQueriesContext(connection) as queries:
        page = incident.get(PAGE)
    keys = {each.key.partition(":")[0] for each in page.context["sentences"]}
    assert {"stuck", "unknown", "blocked"} <= keys, "each statement has found something"
    asked = [each["sql"] for each in queries if '"django_pglock_task"' in each["sql"]]
    assert len(asked) >= 6
    for sql in asked:
        plan = executed(sql)
        assert "Seq Scan" not in {kind for kind, _index in reads(plan)}, sql
        assert not [each for each in nodes(plan) if each["Node Type"] == "Sort" and each["Actual Rows"] > 5 * MOST], sql
        assert rows_read(plan) <= 5 * MOST, sql
        assert pages_read(plan) <= 1500, sql
