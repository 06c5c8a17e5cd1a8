"""A deploy that starts its workers before it has migrated."""

from __future__ import annotations

import sys
from uuid import uuid4

import psycopg
import pytest
from django.db import connections

from qa.processes import readiness
from tests.conftest import NEVER, ROOT, WorkerProcess, database_url, environment_at
from tests.sample.later_version import LAST
from tests.warm.process import start

pytestmark = pytest.mark.acceptance

ENQUEUE = """
INSERT INTO django_pglock_task (queue, backend, task_path, args)
VALUES ('default', 'default', 'tests.sample.tasks.echo', '["hello"]')
"""


def session_in(name):
    """Return a session in a database of the tests' server."""
    settings = connections.settings["default"]
    server = {key: settings[key.upper()] or None for key in ("host", "port", "user", "password")}
    return psycopg.connect(**server, dbname=name, autocommit=True)


@pytest.fixture
def empty_database():
    """The name of a database of this test's own, on the server of the tests."""
    name = f"migrating_{uuid4().hex}"
    with session_in("postgres") as session:
        session.execute(f"CREATE DATABASE {name}")
        yield name
        session.execute(f"DROP DATABASE {name} WITH (FORCE)")


LATER = "tests.settings_later_version"


def migrate(database, *names):
    command = [sys.executable, str(ROOT / "manage.py"), "migrate", "-v0", "django_pglock", *names]
    process = start(command, env=environment_at(database_url(database), DJANGO_SETTINGS_MODULE=LATER))
    assert process.wait(NEVER) == 0


def test_a_worker_waits_for_its_migrations_and_then_works(empty_database, eventually):
    """First there is nothing at all, then all but the last migration, then all."""
    probes = ["--probe-port", "127.0.0.1:0"]
    process = WorkerProcess(*probes, url=database_url(empty_database), DJANGO_SETTINGS_MODULE=LATER)
    try:
        process.wait_for("manage.py migrate django_pglock --database default")
        port = int(process.output.partition("127.0.0.1 port ")[2].partition(".")[0])
        migrate(empty_database, LAST)
        assert readiness(port)[1] == "Migrations of django_pglock are pending.\n"
        assert "is ready" not in process.output
        migrate(empty_database)
        process.wait_for("is ready")
        with session_in(empty_database) as session:
            session.execute(ENQUEUE)
            look = "SELECT 1 FROM django_pglock_task WHERE status = 'SUCCESSFUL'"
            eventually(lambda: session.execute(look).fetchone(), why=process.output)
        assert process.output.count("migrate django_pglock") == 1
        process.process.terminate()
        assert process.wait() == 0
        assert "Traceback" not in process.output
    finally:
        process.end()
