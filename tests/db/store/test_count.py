"""Counts of what is in the queues, for people and for metrics."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Task
from django_pglock.store.count import queue_counts, search_end
from tests.db.admin.visits import make

pytestmark = pytest.mark.django_db

INSERT = """
INSERT INTO django_pglock_task (queue, backend, task_path, status)
SELECT 'mail', 'default', 'app.send', 'READY' FROM generate_series(1, %s)
"""


@pytest.mark.parametrize(("there", "counted", "has_more"), [(9_999, 9_999, False), (10_001, 10_000, True)])
def test_counts_stop_where_the_documentation_says(there, counted, has_more):
    with connection.cursor() as cursor:
        cursor.execute(INSERT, [there])
    [mail] = queue_counts("default")
    assert (mail.queue, mail.counts["READY"], "READY" in mail.at_least) == ("mail", counted, has_more)


def test_counts_stop_at_another_limit_and_each_queue_has_its_own():
    for queue in ("mail", "bulk"):
        for status in ("READY", "FAILED", "BLOCKED"):
            for _ in range(3):
                make(status, queue=queue)
    make("FAILED", queue="late"), make("RUNNING", queue="late")
    bulk, late, mail = Task.objects.queue_counts(most=2)
    for each, queue in ((bulk, "bulk"), (mail, "mail")):
        assert (each.queue, each.counts["READY"], each.counts["FAILED"]) == (queue, 2, 2)
        assert each.at_least == {"READY", "FAILED", "BLOCKED"}
    assert (late.counts["READY"], late.counts["FAILED"], late.counts["RUNNING"]) == (0, 1, 1)
    assert late.at_least == {"BLOCKED"}, "BLOCKED tasks of all queues are counted together"


def test_the_end_of_a_search_is_one_row():
    rows = [make("READY") for _ in range(4)]
    with CaptureQueriesContext(connection) as queries:
        assert search_end(Task.objects.order_by("pk"), most=2) == rows[2].pk
    assert queries[0]["sql"].endswith("LIMIT 1 OFFSET 2")
