"""How many sessions a worker process has: while it is idle, and a while after it has worked."""

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
  AND application_name <> 'lockworker heartbeat process'
"""


def sessions() -> Counter[str]:
    """Return how many sessions there are of each kind. Those of task threads have no name."""
    with connection.cursor() as cursor:
        cursor.execute(SESSIONS)
        return Counter(name for (name,) in cursor.fetchall())


def idle(processes: int) -> Counter[str]:
    """Return the sessions of so many idle processes: one works for each, and one listens and beats for all."""
    heartbeat = "lockworker heartbeat" if processes == 1 else "lockworker shared heartbeat"
    return Counter({heartbeat: 1, "lockworker work": processes})


@pytest.mark.parametrize("processes", [1, 3])
def test_an_idle_process_has_one_session_and_shares_one(worker_process, eventually, processes):
    process = worker_process("--processes", str(processes), "--threads", "2")
    eventually(lambda: process.output.count("is ready") == processes, why=process.output)
    eventually(lambda: sessions() == idle(processes), why=f"it has {sessions()}")
    tasks.record.enqueue("used")
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists(), why=process.output)
    eventually(lambda: sessions()["lockworker work"] == processes, why=f"it has {sessions()}")
    assert "lost its database connection" not in process.output
