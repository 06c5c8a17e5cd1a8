"""Counts of what is in the queues, for people and for metrics."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock.store.count import queue_counts

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
