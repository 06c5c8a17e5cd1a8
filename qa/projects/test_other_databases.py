"""Projects with other databases beside PostgreSQL, and with routers: ``migrate`` and the test runners work in all."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

pytestmark = pytest.mark.acceptance

WITH_SQLITE = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_pglock", "shop"]
DATABASES = {"default": POSTGRES, "legacy": SQLITE}
"""
SHOP_TASKS = """
from django_pglock import task

@task(lock="order:{number}")
def ship(number):
    return number
"""
TABLES = {
    *("attempt", "event", "lease", "queue", "ratelimit", "schedule", "step", "task", "waiter", "worker"),
    "advisorylock",
    "number",
}


def in_sqlite(made):
    """Return the names of our tables in the project's SQLite database."""
    with closing(sqlite3.connect(made.folder / "legacy.sqlite3")) as legacy:
        return [name for (name,) in legacy.execute("SELECT name FROM sqlite_master") if "pglock" in name]


def ours(tables):
    return {name.removeprefix("django_pglock_") for name in tables}


def test_a_second_database_that_is_not_postgresql_is_migrated_to_nothing(project):
    """Without a router Django migrates each app in each database. Ours needs PostgreSQL."""
    made = project(settings=WITH_SQLITE, shop__tasks=SHOP_TASKS)
    _, shown, _, statements, _ = made.manage_each(
        "migrate -v0 --database legacy",
        "showmigrations django_pglock --database legacy",
        "migrate --check --database legacy",
        "sqlmigrate --database legacy django_pglock 0001",
    )
    assert in_sqlite(made) == []
    assert "[X] 0001_initial" in shown
    assert "BEGIN" in statements
    assert "django_pglock_task" not in statements
    assert "VIEW" not in statements
    _, shown, _ = made.manage_each(
        "migrate -v0 --database legacy django_pglock zero", "showmigrations django_pglock --database legacy"
    )
    assert "[ ] 0001_initial" in shown


A_ROW_IN_EVERY_STATUS = """
WITH made AS (
    INSERT INTO django_pglock_task
           (status, queue, backend, task_path, lock_key, run_after, worker, last_attempted_at, finished_at)
    SELECT status, 'default', 'default', 'shop.tasks.send', 'a', now(), '00000000-0000-0000-0000-000000000001', now(),
           CASE WHEN status IN ('SUCCESSFUL', 'FAILED', 'CANCELLED') THEN now() END
    FROM unnest(ARRAY['SCHEDULED', 'BLOCKED', 'READY', 'RUNNING', 'SUCCESSFUL', 'FAILED', 'CANCELLED']) AS status
    RETURNING id
), attempts AS (
    INSERT INTO django_pglock_attempt (task_id, number, started_at, finished_at, outcome, exception_path, traceback)
    SELECT id, 1, now(), now(), 'FAILED', 'ValueError', '' FROM made
)
INSERT INTO django_pglock_waiter (task_id, awaited) SELECT id, id FROM made
"""


def test_the_tables_are_created_and_dropped_in_postgresql(project):
    made = project(settings=WITH_SQLITE, shop__tasks=SHOP_TASKS)
    _, changes, forwards, backwards, _ = made.manage_each(
        "migrate -v0",
        "makemigrations --check --dry-run",
        "sqlmigrate django_pglock 0001",
        "sqlmigrate --backwards django_pglock 0001",
    )
    assert ours(made.tables()) == TABLES
    assert "No changes detected" in changes
    assert "CREATE VIEW" in forwards
    assert "DROP VIEW" in backwards
    with made.session() as session:
        session.execute(A_ROW_IN_EVERY_STATUS)
    made.manage("migrate", "-v0", "django_pglock", "zero")
    assert made.tables() == set()


def test_the_view_of_locks_is_created_without_migrations(project):
    """As with --nomigrations of pytest-django: Django makes the tables from the models, and nothing else."""
    made = project(settings=WITH_SQLITE + "MIGRATION_MODULES = {'django_pglock': None}", shop__tasks=SHOP_TASKS)
    for _ in range(2):
        made.manage_each("migrate -v0 --run-syncdb", "migrate -v0 --run-syncdb --database legacy")
    assert ours(made.tables()) == TABLES
    assert in_sqlite(made) == []
    with made.session() as session:
        options = "SELECT reloptions FROM pg_class WHERE relname = 'django_pglock_task'"
        assert "fillfactor=80" in session.execute(options).fetchone()[0]
        assert session.execute("SELECT count(*) FROM django_pglock_advisorylock").fetchone() == (0,)


FEW_FEATURES = """
from django.db.backends.sqlite3.base import DatabaseWrapper as Sqlite
from django.db.backends.sqlite3.features import DatabaseFeatures as Features

class DatabaseFeatures(Features):
    supports_partial_indexes = False
    supports_expression_defaults = False
    supports_json_field = False

class DatabaseWrapper(Sqlite):
    vendor = "few"
    features_class = DatabaseFeatures
"""


def test_a_database_with_fewer_features_gets_no_warnings_about_our_models(project):
    """As MySQL, which has no partial indexes: Django warns at each migrate of each model that has some."""
    made = project(
        settings=WITH_SQLITE + "DATABASES['legacy'] = {**SQLITE, 'ENGINE': 'few'}",
        shop__tasks=SHOP_TASKS,
        few__base=FEW_FEATURES,
    )
    checked, migrated, _ = made.manage_each(
        "check --database default --database legacy", "migrate -v0 --database legacy"
    )
    assert "no issues" in checked
    assert "pglock" not in migrated
    assert in_sqlite(made) == []


PROJECT_TESTS = """
from django.db import connections
from django.test import TestCase, TransactionTestCase

from django_pglock import Lease, lock
from django_pglock.models import Task
from django_pglock.worker import Worker
from shop.tasks import ship


class DefaultOnly(TestCase):
    def test_enqueue_and_lock(self):
        with lock("order:5"):
            result = ship.enqueue(5)
        self.assertEqual(Task.objects.get().pk, int(result.id))


class Both(TestCase):
    databases = {"default", "legacy"}

    def test_enqueue_and_lock(self):
        with Lease("report", ttl=60), lock("order:5"):
            ship.enqueue(5)
        self.assertEqual(Task.objects.count(), 1)


class Committed(TransactionTestCase):
    databases = "__all__"

    def test_enqueue(self):
        ship.enqueue(5)
        self.assertEqual(Task.objects.count(), 1)

    def test_nothing_is_left(self):
        self.assertEqual(Task.objects.count(), 0)


class Kept(TransactionTestCase):
    databases = "__all__"
    serialized_rollback = True

    def test_one(self):
        ship.enqueue(5)

    def test_two(self):
        ship.enqueue(5)


class Reset(TransactionTestCase):
    databases = "__all__"
    reset_sequences = True

    def test_ids_begin_at_one(self):
        self.assertEqual(ship.enqueue(5).id, "1")


class Alone(TransactionTestCase):
    databases = "__all__"
    available_apps = ["django_pglock"]

    def test_a_worker(self):
        ship.enqueue(5)
        worker = Worker(threads=1, drain=True)
        worker.run()
        self.assertEqual(Task.objects.get().status, "SUCCESSFUL")


class Without(TransactionTestCase):
    databases = "__all__"
    available_apps = ["shop"]

    def test_locks(self):
        with lock("order:5"):
            pass
"""


#: A test for pytest alone, with a fixture of our plugin.
WITH_FIXTURE = """
import pytest
from django_pglock import LockNotAvailable, lock
from shop.tests import *


def test_held(hold_lock, db):
    hold_lock("order", 5)
    with pytest.raises(LockNotAvailable), lock("order:5", timeout=0):
        pass
"""


@pytest.fixture
def tested(project):
    """A project with tests of its own.

    Without content types: with them Django itself fails where a class with ``serialized_rollback`` runs after one
    without, as each makes the same rows.
    """
    settings = WITH_SQLITE + "INSTALLED_APPS = ['django_pglock', 'shop']"
    return project(settings=settings, shop__tasks=SHOP_TASKS, shop__tests=PROJECT_TESTS, test_shop=WITH_FIXTURE)


def test_djangos_test_runner_works_in_parallel(tested):
    assert "OK" in tested.manage("test", "--noinput", "--parallel", "2")


def test_pytest_works_in_parallel(tested, monkeypatch):
    # Three processes import no plugins that have no part in it. pytest would compile our modules anew in each.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    plugins = ("xdist.plugin", "pytest_django.plugin", "django_pglock.pytest_plugin")
    used = [word for name in plugins for word in ("-p", name)]
    shown = tested.run("-m", "pytest", "-q", "-n", "2", "--ds", "settings", *used, "test_shop.py")
    assert "10 passed" in shown
