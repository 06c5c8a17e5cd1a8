"""The server crashes and loses everything that was not durable."""

from __future__ import annotations

import psycopg
import pytest

from example_project.postgres import PrivatePostgres
from tests.conftest import WorkerProcess, ask, make_tables

pytestmark = pytest.mark.acceptance


@pytest.fixture
def server():
    """A durable server of this test's own, with the tables in it."""
    with PrivatePostgres(durable=True) as server:
        make_tables(server)
        yield server


ENQUEUE = """
INSERT INTO django_pglock_task (queue, backend, task_path, args)
SELECT 'default', 'default', 'tests.sample.tasks.record_soon', jsonb_build_array('outage', n)
FROM generate_series(1, 250) AS n
"""


def test_effects_whose_commit_did_not_wait_for_the_disk_exist_once_after_a_crash(server, eventually):
    """An immediate shutdown, as a power cut looks like: the tasks of the last moment run again."""
    process = WorkerProcess("--threads", "2", url=server.url)
    try:
        process.wait_for("is ready")
        ask(server, ENQUEUE)
        eventually(lambda: ask(server, "SELECT count(*) FROM sample_effect")[0][0] > 100)
        server.halt("immediate")
        server.launch()
        succeeded = "SELECT count(*) FROM django_pglock_task WHERE status = 'SUCCESSFUL'"
        eventually(lambda: ask(server, succeeded) == [(250,)], why="some task has no success")
        assert ask(server, "SELECT count(DISTINCT number), count(*) FROM sample_effect") == [(250, 250)]
    finally:
        process.end()


INSERT = """
INSERT INTO django_pglock_task (queue, backend, task_path)
SELECT 'default', 'default', 'tests.sample.session_tasks.' || name FROM unnest(%s::text[]) AS name
"""
CRASHES = "task_path LIKE '%crash_server'"
CUT_OFF = "SELECT count(*) FROM django_pglock_attempt JOIN django_pglock_task AS task ON task.id = task_id WHERE"


def test_a_task_that_crashes_the_server_ends_failed_and_its_neighbours_do_not(server, eventually):
    """Before, one query crashed the whole server 31 times in 150 s, and would have gone on.

    All sessions end with each crash, but the server tells the others that they are not the cause.
    """
    workers = [WorkerProcess("--threads", "2", url=server.url) for _ in range(2)]
    try:
        for each in workers:
            each.wait_for("is ready")
        # At once: the first crash may come while others would still be enqueued.
        ask(server, INSERT, ["write_and_sleep"] * 5 + ["crash_server"] + ["write_and_sleep"] * 25)
        failed = "SELECT count(*) FROM django_pglock_task WHERE status = 'FAILED'"
        eventually(lambda: ask_if_up(server, failed) == [(1,)], why="the task runs for ever")
        assert ask(server, failed + f" AND rescues = 3 AND {CRASHES}") == [(1,)]
        assert ask(server, f"{CUT_OFF} {CRASHES}")[0][0] <= 6
        assert ask(server, f"{CUT_OFF} NOT {CRASHES}")[0][0] > 0, "no neighbour was cut off"
        assert ask(server, f"SELECT sum(rescues) FROM django_pglock_task WHERE NOT {CRASHES}") == [(0,)]
        succeeded = "SELECT count(*) FROM django_pglock_task WHERE status = 'SUCCESSFUL'"
        eventually(lambda: ask(server, succeeded) == [(30,)], why="a neighbour was lost")
        assert ask(server, "SELECT count(*) FROM sample_effect") == [(30,)]
    finally:
        for each in workers:
            each.end()


def ask_if_up(server, sql):
    try:
        return ask(server, sql)
    except psycopg.OperationalError:
        return None
