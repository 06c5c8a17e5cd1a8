"""The server crashes and loses everything that was not durable."""

from __future__ import annotations

import time

import psycopg
import pytest

from example_project.postgres import PrivatePostgres
from tests.conftest import WorkerProcess, make_tables

pytestmark = pytest.mark.acceptance

ENQUEUE = """
INSERT INTO django_pglock_task (queue, backend, task_path, args)
SELECT 'default', 'default', 'tests.sample.tasks.record_atomically', jsonb_build_array('outage', n)
FROM generate_series(%s::int, %s::int) AS n
"""


@pytest.fixture
def server():
    """A durable server of this test's own, with the tables in it."""
    with PrivatePostgres(durable=True) as server:
        make_tables(server)
        yield server


def ask(server, sql, *params):
    with psycopg.connect(host=str(server.folder), user="postgres", dbname="postgres", autocommit=True) as connection:
        answer = connection.execute(sql, params)
        return answer.fetchone()[0] if answer.description else None


def test_a_crash_of_the_server_under_load_loses_nothing_and_work_continues(server, eventually):
    """An immediate shutdown, as a power cut looks like, and two seconds of outage. Every atomic task has its effect
    exactly once; the worker reconnects by itself, as the same worker."""
    process = WorkerProcess("--threads", "2", url=server.url)
    try:
        process.wait_for("is ready")
        ask(server, ENQUEUE, 1, 250)
        eventually(lambda: ask(server, "SELECT count(*) FROM sample_effect") > 100)
        server.halt("immediate")
        time.sleep(2)
        server.launch()
        ask(server, ENQUEUE, 251, 260)
        eventually(
            lambda: ask(server, "SELECT count(*) FROM django_pglock_task WHERE status = 'SUCCESSFUL'") == 260,
            why="some task has no success",
        )
        assert ask(server, "SELECT count(DISTINCT number) FROM sample_effect") == 260
        assert ask(server, "SELECT count(*) FROM sample_effect") == 260
        assert process.process.poll() is None
        assert "works again" in process.output
    finally:
        process.process.terminate()
        process.wait()
        process.process.stdout.close()
