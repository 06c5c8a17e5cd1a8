"""How many sessions a worker has: while it is idle, and a while after it has worked.

The session of the upkeep is not counted. It is there for a moment only, every few seconds.
"""

from __future__ import annotations

from collections import Counter

import pytest
from django.db import connection

from django_pglock.models import Task
from tests.sample import tasks

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]

SESSIONS = """
SELECT application_name FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
  AND application_name <> 'lockworker upkeep'
"""


def sessions() -> Counter[str]:
    """Return how many sessions there are of each kind. Those of task threads have no name."""
    with connection.cursor() as cursor:
        cursor.execute(SESSIONS)
        return Counter(name for (name,) in cursor.fetchall())


def idle(processes: int) -> Counter[str]:
    """Return the sessions of a worker with so many idle children: one for each, and the session of the heartbeat."""
    return Counter({"lockworker heartbeat": 1, "lockworker fetcher": processes})


@pytest.mark.parametrize("processes", [1, 3])
def test_an_idle_child_has_one_session_and_shares_one(worker_process, eventually, processes):
    process = worker_process("--processes", str(processes), "--threads", "2")
    eventually(lambda: process.output.count("is ready") == processes, why=process.output)
    eventually(lambda: sessions() == idle(processes), why=f"it has {sessions()}")
    tasks.record.enqueue("used")
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists(), why=process.output)
    # The sessions of the task's thread and of the settler are closed after a minute.
    used = idle(processes) + Counter({"": 1, "lockworker settler": 1})
    assert sessions() <= used
    assert "lost its database connection" not in process.output
