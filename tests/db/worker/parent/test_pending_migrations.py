"""A worker whose tables are changed while it works: it waits, and loses nothing."""

from __future__ import annotations

import pytest
from django.db import connections
from django.test import override_settings

from django_pglock.models import Task
from django_pglock.worker.parent.heartbeat import pending_migrations
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def execute(sql, *values):
    execute_sql(sql, values or None)


@pytest.fixture
def renamed_table():
    """Rename the table of tasks, as a migration that makes it anew, and rename it back."""
    execute("ALTER TABLE django_pglock_task RENAME TO elsewhere")
    back = [lambda: execute("ALTER TABLE elsewhere RENAME TO django_pglock_task")]
    yield lambda: back.pop()()
    while back:
        back.pop()()


@pytest.fixture
def in_transaction():
    """Roll back at the end of the test what it changes in the schema and in the records."""
    connections["default"].set_autocommit(False)
    yield
    connections["default"].rollback()
    connections["default"].set_autocommit(True)


def test_an_outcome_waits_until_the_table_is_back(worker, eventually, request):
    """The row cannot be written because of the table, so the task does not fail."""
    running = worker()
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists())
    bring_back = request.getfixturevalue("renamed_table")
    running_tasks.note("go on")
    for part in (running.settler, running.feeder):
        eventually(lambda: part._failures > 1, why=f"the {part.name} has not tried again")  # noqa: B023
    # Each step of the upkeep fails separately, and is tried again in the next round.
    eventually(lambda: running.upkeep._failing, why="the upkeep has not tried")
    bring_back()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists())
    assert Task.objects.get().attempts == 1
    result = tasks.echo.enqueue("still here")
    eventually(lambda: Task.objects.filter(pk=result.id, status="SUCCESSFUL").exists())
    eventually(lambda: not running.upkeep._failing, why="the upkeep does not work again")


def test_no_migration_is_pending_in_the_database_of_the_tests():
    assert pending_migrations("default") == []


@override_settings(MIGRATION_MODULES={"django_pglock": "tests.sample.later_version"})
def test_a_migration_without_a_record_is_pending():
    assert pending_migrations("default") == ["9999_later"]


def test_without_a_table_of_migrations_all_are_pending(in_transaction):
    execute("ALTER TABLE django_migrations RENAME TO elsewhere")
    assert pending_migrations("default")[0] == "0001_initial"


@override_settings(MIGRATION_MODULES={"django_pglock": None})
def test_tables_made_without_migrations_have_no_pending_migrations(in_transaction):
    """As in tests without migrations."""
    execute("DELETE FROM django_migrations WHERE app = 'django_pglock'")
    assert pending_migrations("default") == []
