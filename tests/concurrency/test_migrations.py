"""Each migration after the first one is stopped half-way by an open transaction. Meanwhile tasks come and end.

Workers of the version before need the tables at that moment, so the statements here are plain SQL on the first tables.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from importlib import import_module
from uuid import uuid4

import pytest
from django.db import OperationalError, connections
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.recorder import MigrationRecorder

from django_pglock.migrations import _operations as operations
from tests.conftest import NEVER
from tests.projects.conftest import server, session_in
from tests.unit.test_migrations import names

APP, ALIAS = "django_pglock", "migrating"
#: The first index that a migration adds to the table of tasks.
INDEX = "pglock_task_failed_path"
ENQUEUE = "INSERT INTO django_pglock_task (queue, backend, task_path) VALUES ('default', 'default', 'x') RETURNING id"
CLAIM = """
UPDATE django_pglock_task SET status = 'RUNNING', worker = gen_random_uuid(), attempts = attempts + 1,
    last_attempted_at = now()
WHERE id = (
    SELECT id FROM django_pglock_task WHERE status = 'READY' ORDER BY id DESC LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED)
RETURNING id
"""
SETTLE = "UPDATE django_pglock_task SET status = 'FAILED', finished_at = now() WHERE id = %s"
NOTE = """
INSERT INTO django_pglock_attempt (task_id, number, started_at, finished_at, outcome, exception_path, traceback)
VALUES (%s, 1, now(), now(), 'FAILED', 'x', 'x')
"""
VALIDATED = "SELECT convalidated FROM pg_constraint WHERE conname = 'pglock_task_run_after'"
#: The session of the migration, while it waits for that of the first parameter.
WAITING = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND %s = ANY (pg_blocking_pids(pid))"


class Migrating(threading.Thread):
    """Applies or unapplies migrations until ``name`` is the last, and keeps the error."""

    def __init__(self, name):
        super().__init__(daemon=True)
        self.target, self.error = name, None
        self.start()

    def run(self):
        try:
            MigrationExecutor(connections[ALIAS]).migrate([(APP, self.target)])
        except Exception as error:
            self.error = error
        finally:
            connections[ALIAS].close()

    def end(self):
        self.join(NEVER)
        assert not self.is_alive(), "the migration hangs"
        return self.error


@pytest.fixture
def database(django_db_blocker, monkeypatch):
    """The name of a database of this test's own, which has the tables of the first migration."""
    monkeypatch.setattr(operations, "BETWEEN_TRIES", 0.01)
    name = f"migrating_{uuid4().hex}"
    with session_in("postgres") as session, django_db_blocker.unblock():
        session.execute(f"CREATE DATABASE {name}")
        connections.settings[ALIAS] = {**connections.settings["default"], **server(name)}
        try:
            assert Migrating(names()[0]).end() is None
            yield name
        finally:
            connections[ALIAS].close()
            del connections[ALIAS], connections.settings[ALIAS]
            session.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def open_transaction(database):
    """A transaction that has written to the tables of tasks and of attempts; committed at the end of the block."""
    with session_in(database) as session, session.transaction():
        [task] = session.execute(ENQUEUE).fetchone()
        session.execute(NOTE, [task])
        yield session.info.backend_pid


def waits_for(pid, migrating, session):
    """Return the process id of the session of a migration that waits, or True if the migration has ended."""
    return not migrating.is_alive() or session.execute(WAITING, [pid]).fetchone()


def a_task_comes_and_ends(session):
    session.execute(ENQUEUE)
    [task] = session.execute(CLAIM).fetchone()
    session.execute(NOTE, [task])
    session.execute(SETTLE, [task])


def is_valid(database):
    with session_in(database) as session:
        found = session.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)", [INDEX])
        return found.fetchone()


def touches(name):
    """Return whether a migration changes the table of tasks or that of attempts."""
    kinds = (operations.AddFieldOnline, operations.AddCheckOnline, operations.AddIndexOnline)
    changes = import_module(f"django_pglock.migrations.{name}").Migration.operations
    return any(isinstance(each, kinds) and each.model_name in ("task", "attempt") for each in changes)


@pytest.mark.parametrize("is_forwards", [True, False])
def test_while_a_migration_waits_tasks_are_enqueued_claimed_and_settled(database, eventually, is_forwards):
    steps = names()[1:]
    if not is_forwards:
        assert Migrating(steps[-1]).end() is None
        steps = names()[-2::-1]
    waited = []
    with session_in(database) as session:
        session.execute(f"SET lock_timeout = '{NEVER:.0f}s'")
        for step in steps:
            with open_transaction(database) as pid:
                migrating = Migrating(step)
                eventually(lambda pid=pid, migrating=migrating: waits_for(pid, migrating, session))
                for _ in range(3):
                    a_task_comes_and_ends(session)
                waited.append(migrating.is_alive())
            assert migrating.end() is None
    changed = names()[1:] if is_forwards else names()[:0:-1]
    assert waited == [touches(name) for name in changed], "each change of these tables was really stopped half-way"


def test_an_index_that_was_interrupted_is_built_again(database, eventually):
    first, second = names()[:2]
    with session_in(database) as session, open_transaction(database) as pid:
        migrating = Migrating(second)
        found = eventually(lambda: waits_for(pid, migrating, session))
        session.execute("SELECT pg_cancel_backend(%s)", found)
        assert isinstance(migrating.end(), OperationalError)
    assert is_valid(database) == (False,)
    assert Migrating(second).end() is None
    assert is_valid(database) == (True,)
    assert Migrating(first).end() is None
    assert is_valid(database) is None


def test_an_index_that_was_built_and_not_recorded_is_left_alone(database):
    second = names()[1]
    assert Migrating(second).end() is None
    MigrationRecorder(connections[ALIAS]).record_unapplied(APP, second)
    connections[ALIAS].close()
    assert Migrating(second).end() is None
    assert is_valid(database) == (True,)


def test_the_limit_of_the_caller_for_waits_is_as_before(database):
    """The migrations of other apps run in the same session."""
    connection = connections[ALIAS]
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '7s'")
    try:
        MigrationExecutor(connection).migrate([(APP, names()[-1])])
        with connection.cursor() as cursor:
            cursor.execute("SHOW lock_timeout")
            assert cursor.fetchone() == ("7s",)
    finally:
        connection.close()


def test_dates_that_python_does_not_have_become_the_nearest_ones(database):
    """They keep their meaning, at once or never, and the task can be shown."""
    before, _, checked = names()[10:13]
    assert Migrating(before).end() is None
    with session_in(database) as session:
        for date in ("infinity", "-infinity", "10000-01-01", "2000-01-01"):
            session.execute(
                "INSERT INTO django_pglock_task (queue, backend, task_path, status, run_after) "
                "VALUES ('default', 'default', 'x', 'SCHEDULED', %s)",
                [date],
            )
        session.execute(ENQUEUE)
        assert Migrating(checked).end() is None
        years = session.execute(
            "SELECT extract(year FROM run_after AT TIME ZONE 'UTC') FROM django_pglock_task ORDER BY id"
        )
        assert [year for (year,) in years] == [9999, 1, 9999, 2000, None]
        assert session.execute(VALIDATED).fetchall() == [(True,)]
