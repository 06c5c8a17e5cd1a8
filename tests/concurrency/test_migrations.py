"""Each migration after the first one is stopped half-way by an open transaction. Meanwhile tasks come and end.

The migrations are those of the package, and behind them those of ``tests/sample/online_migrations``, which have each
operation for a table in use. Workers of the version before need the tables at that moment, so the statements here are
plain SQL on the first tables.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from uuid import uuid4

import pytest
from django.db import OperationalError, connections
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.recorder import MigrationRecorder
from psycopg.errors import CheckViolation

from django_pglock.migrations import _operations as operations
from tests.conftest import NEVER
from tests.projects.conftest import server, session_in
from tests.sample import online_migrations
from tests.unit.test_migrations import migration_of, names

APP, ALIAS = "django_pglock", "migrating"
NAMES = names(online_migrations)
FIRST, LAST = NAMES[0], NAMES[-1]
#: The migration that makes an index of the table of tasks, the one before, and the index.
BEFORE_INDEX, WITH_INDEX = online_migrations.LAST, "9001_index"
INDEX = "online_index"
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
VALIDATED = "SELECT convalidated FROM pg_constraint WHERE conname = 'online_check'"
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
def database(django_db_blocker, monkeypatch, settings):
    """The name of a database of this test's own, which has the tables of the first migration."""
    settings.MIGRATION_MODULES = {APP: online_migrations.__name__}
    monkeypatch.setattr(operations, "LOCK_PAUSE", 0.01)
    name = f"migrating_{uuid4().hex}"
    with session_in("postgres") as session, django_db_blocker.unblock():
        session.execute(f"CREATE DATABASE {name}")
        connections.settings[ALIAS] = {**connections.settings["default"], **server(name)}
        try:
            assert Migrating(FIRST).end() is None
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
    changes = migration_of(online_migrations, name).operations
    return any(isinstance(each, kinds) and each.model_name in ("task", "attempt") for each in changes)


@pytest.mark.parametrize("is_forwards", [True, False])
def test_while_a_migration_waits_tasks_are_enqueued_claimed_and_settled(database, eventually, is_forwards):
    steps = NAMES[1:]
    if not is_forwards:
        assert Migrating(LAST).end() is None
        steps = NAMES[-2::-1]
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
    changed = NAMES[1:] if is_forwards else NAMES[:0:-1]
    assert waited == [touches(name) for name in changed], "each change of these tables was really stopped half-way"
    assert waited.count(True) >= 4


def test_an_index_that_was_interrupted_is_built_again(database, eventually):
    assert Migrating(BEFORE_INDEX).end() is None
    with session_in(database) as session, open_transaction(database) as pid:
        migrating = Migrating(WITH_INDEX)
        found = eventually(lambda: waits_for(pid, migrating, session))
        session.execute("SELECT pg_cancel_backend(%s)", found)
        assert isinstance(migrating.end(), OperationalError)
    assert is_valid(database) == (False,)
    assert Migrating(WITH_INDEX).end() is None
    assert is_valid(database) == (True,)
    assert Migrating(BEFORE_INDEX).end() is None
    assert is_valid(database) is None


def test_an_index_built_by_an_unrecorded_migration_is_not_built_again(database):
    assert Migrating(WITH_INDEX).end() is None
    MigrationRecorder(connections[ALIAS]).record_unapplied(APP, WITH_INDEX)
    connections[ALIAS].close()
    assert Migrating(WITH_INDEX).end() is None
    assert is_valid(database) == (True,)


def test_the_limit_of_the_caller_for_waits_is_as_before(database):
    """The migrations of other apps run in the same session."""
    connection = connections[ALIAS]
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '7s'")
    try:
        MigrationExecutor(connection).migrate([(APP, LAST)])
        with connection.cursor() as cursor:
            cursor.execute("SHOW lock_timeout")
            assert cursor.fetchone() == ("7s",)
    finally:
        connection.close()


def test_rows_that_a_new_constraint_refuses_comply_before_it_is_validated(database):
    """Those that the old version has written, and those that it writes between the two steps of the first migration."""
    assert Migrating("9003_column_of_attempts").end() is None
    write = "INSERT INTO django_pglock_task (queue, backend, task_path) VALUES ('default', %s, 'x')"
    drop, add = (
        f"ALTER TABLE django_pglock_task {each}"
        for each in ("DROP CONSTRAINT online_check", "ADD CONSTRAINT online_check CHECK (backend <> '') NOT VALID")
    )
    with session_in(database) as session:
        session.execute(write, [""])
        assert Migrating("9005_check").end() is None
        assert session.execute(VALIDATED).fetchall() == [(False,)]
        with session.transaction():
            session.execute(drop)
            session.execute(write, [""])
            session.execute(write, ["other"])
            session.execute(add)
        assert Migrating("9006_valid_check").end() is None
        assert session.execute(VALIDATED).fetchall() == [(True,)]
        backends = session.execute("SELECT backend FROM django_pglock_task ORDER BY id").fetchall()
        assert backends == [("default",), ("default",), ("other",)]
        with pytest.raises(CheckViolation, match="online_check"):
            session.execute(write, [""])
