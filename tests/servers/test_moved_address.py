"""An address that leads to a standby for some seconds, as while it moves in a failover."""

from __future__ import annotations

import time

import psycopg
import pytest

from example_project.postgres import PrivatePostgres
from tests.conftest import WorkerProcess, make_tables
from tests.proxy import Proxy

pytestmark = pytest.mark.acceptance

ENQUEUE = """
INSERT INTO django_pglock_task (queue, backend, task_path, args)
SELECT 'default', 'default', 'tests.sample.session_tasks.' || name, '[8]' FROM unnest(%s::text[]) AS name
"""
READ_ONLY = "SELECT 1 FROM django_pglock_attempt WHERE outcome = %s AND traceback LIKE '%%ReadOnlySqlTransaction%%'"
SESSIONS = "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
STATUSES = "SELECT status, count(*) FROM django_pglock_task GROUP BY status"
TASKS = ["write_late_in_coroutine"] * 3 + ["write_late"] * 3


@pytest.fixture(scope="module")
def servers():
    with PrivatePostgres() as primary:
        make_tables(primary)
        with PrivatePostgres(standby_of=primary) as standby:
            yield primary, standby


def ask(server, sql, *params):
    with psycopg.connect(host=str(server.folder), user="postgres", dbname="postgres", autocommit=True) as connection:
        answer = connection.execute(sql, params)
        return answer.fetchall() if answer.description else None


def test_nothing_stays_at_a_standby_to_which_the_address_led_for_a_while(servers, eventually):
    """Neither a service nor a thread; and what failed because its session could only read has not failed."""
    primary, standby = servers
    with Proxy(str(primary.folder)) as proxy:
        process = WorkerProcess("--threads", "3", url=proxy.url("postgres"))
        try:
            process.wait_for("is ready")
            ask(primary, ENQUEUE, TASKS)
            eventually(lambda: ask(primary, STATUSES) == [("RUNNING", 6)], why=process.output)
            proxy.lead_to(str(standby.folder))
            eventually(lambda: ask(standby, SESSIONS), why=f"nobody came to the standby: {process.output}")
            time.sleep(10)
            proxy.host = str(primary.folder)  # what is open stays where it is
            eventually(lambda: not ask(standby, SESSIONS), why="somebody stays at the standby")
            # They are scheduled, so upkeep works again.
            eventually(lambda: ask(primary, STATUSES) == [("SUCCESSFUL", 6)], why=process.output)
            assert len(ask(primary, READ_ONLY, "LOST")) >= 3, "not each thread has met the standby"
            assert not ask(primary, READ_ONLY, "FAILED"), process.output
        finally:
            process.end()
