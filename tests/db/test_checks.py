"""System checks: each check reports its problem and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from django.core.checks import run_checks
from django.db import OperationalError, connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_pglock import checks, lock, task
from django_pglock.backend import PostgresBackend
from django_pglock.tasks import registry
from django_pglock.tasks.compat import BaseTaskBackend, task_backends
from tests.sample import scheduled
from tests.sample import tasks as plain_tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db

SINCE_17 = pytest.mark.skipif("connection.pg_version < 170000", reason="PostgreSQL 17 has it first.")
SQLITE = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}


class OnlyInOther:
    """A router as in projects with several databases."""

    def allow_migrate(self, db, app_label, model_name=None, **hints):
        return db == "other" if (app_label, model_name) == ("django_pglock", "task") else None


def ids(**options):
    return [message.id for message in run_checks(**options) if message.id.startswith("django_pglock.")]


def test_a_correct_project_gets_no_message():
    assert ids() == []
    assert ids(databases=["default"]) == []
    assert ids(databases=["default"], include_deployment_checks=True) == [], "the example follows our own hints"


@override_settings(DJANGO_PGLOCK={"USING": "nowhere"})
def test_an_alias_that_does_not_exist_is_named():
    [problem] = checks.check_databases()
    assert (problem.id, "'nowhere'" in problem.msg) == ("django_pglock.E002", True)


@override_settings(
    TASKS={"default": {"BACKEND": "django_pglock.backend.PostgresBackend", "OPTIONS": {"database": "x"}}}
)
def test_the_database_of_a_task_backend_is_checked_as_well():
    [problem] = checks.check_databases()
    assert "TASKS['default']" in problem.hint


def test_a_database_of_another_kind_is_named_by_the_setting_that_was_typed():
    """DJANGO_PGLOCK['USING'] is not in these settings, so the message is about DATABASES."""
    script = f"""
import django
from django.conf import settings
settings.configure(DATABASES={{"default": {SQLITE!r}}}, INSTALLED_APPS=["django_pglock"])
django.setup()
from django_pglock.checks import check_databases
for problem in check_databases():
    print(problem.id, problem.msg, problem.hint)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == (
        "django_pglock.E002 DATABASES['default'] is sqlite, and the locks and tasks of django_pglock need PostgreSQL. "
        "Set DATABASES['default']['ENGINE'] to 'django.db.backends.postgresql', or name the alias of a PostgreSQL "
        "database in DJANGO_PGLOCK['USING'].\n"
    )


def test_a_pooler_is_recognised_by_its_process_number(monkeypatch):
    """Behind PgBouncer the process id that libpq knows is one that PgBouncer invents."""
    monkeypatch.setattr(checks, "READ_SERVER", checks.READ_SERVER.replace("pg_backend_pid()", "0"))
    assert ids(databases=["default"]) == ["django_pglock.W001"]
    with override_settings(DJANGO_PGLOCK={"SCOPE": "transaction"}):
        assert ids(databases=["default"]) == []


def test_a_check_reports_an_old_server(monkeypatch):
    monkeypatch.setattr(checks, "OLDEST_SERVER", connection.pg_version // 10000 + 1)
    assert ids(databases=["default"]) == ["django_pglock.W003"]


def test_check_does_not_report_a_server_that_cannot_be_reached(monkeypatch):
    def refuse():
        raise OperationalError

    monkeypatch.setattr(connection, "cursor", refuse)
    assert ids(databases=["default"], include_deployment_checks=True) == []


@pytest.mark.parametrize("wrong", [{"SCOPE": "forever"}, {"USING": None}, {"USING": 5}])
def test_an_invalid_setting_is_reported_once_and_breaks_no_other_check(setting_of_database, wrong):
    setting_of_database("idle_session_timeout", "1h")
    with override_settings(DJANGO_PGLOCK=wrong):
        assert ids(databases=["default"], include_deployment_checks=True) == ["django_pglock.E001"]


def test_the_server_check_sends_one_query():
    with CaptureQueriesContext(connection) as asked:
        checks.check_server(databases=["default"])
    assert len(asked) == 1


def test_checks_report_nothing_if_there_is_no_table_of_tasks():
    """Before the first migration, and in a database for locks only."""
    execute_sql("ALTER TABLE django_pglock_task RENAME TO elsewhere")
    assert ids(databases=["default"]) == []


def test_a_check_reports_a_standby_and_its_setting(monkeypatch):
    """With real servers: qa/servers/test_standby.py."""
    monkeypatch.setattr(checks, "READ_SERVER", checks.READ_SERVER.replace("pg_is_in_recovery()", "true"))
    [problem] = checks.check_server(databases=["default"])
    assert problem.id == "django_pglock.W004"
    assert "DJANGO_PGLOCK['USING']" in problem.hint


@pytest.fixture
def default(settings):
    """The settings of the database, restored after the test."""
    before = settings.DATABASES["default"].copy()
    yield settings.DATABASES["default"]
    settings.DATABASES["default"].clear()
    settings.DATABASES["default"].update(before)


@pytest.fixture
def setting_of_database(transactional_db):
    """Set a PostgreSQL setting for the database of the tests, as its owner does."""
    name = connection.ops.quote_name(connection.settings_dict["NAME"])

    def change(setting, value):
        execute_sql(f"ALTER DATABASE {name} SET {setting} = '{value}'")
        connection.close()  # the setting applies to new sessions

    yield change
    execute_sql(f"ALTER DATABASE {name} RESET ALL")
    connection.close()


@pytest.mark.parametrize(
    ("limit", "scope", "expected"),
    [
        ("idle_session_timeout", "auto", ["django_pglock.W006"]),
        ("idle_session_timeout", "transaction", []),
        ("idle_in_transaction_session_timeout", "transaction", ["django_pglock.W006"]),
        ("statement_timeout", "transaction", ["django_pglock.W006"]),
        pytest.param("transaction_timeout", "auto", ["django_pglock.W006"], marks=SINCE_17),
        ("lock_timeout", "auto", []),
    ],
)
def test_a_check_reports_database_timeouts_that_end_waits_or_sessions(
    settings, setting_of_database, limit, scope, expected
):
    settings.DJANGO_PGLOCK = {"SCOPE": scope}
    setting_of_database(limit, "1h")
    problems = checks.check_server(databases=["default"])
    assert [problem.id for problem in problems] == expected
    for problem in problems:
        assert f"{limit} = 3600 s (from: database)" in problem.msg
        assert f"-c {limit}=0" in problem.hint


@pytest.mark.parametrize("limit", ["idle_session_timeout", "statement_timeout"])
def test_the_option_in_the_hint_of_a_check_corrects_the_problem(default, setting_of_database, limit):
    """The options of a connection take precedence over those of the database and the role."""
    setting_of_database(limit, "1h")
    [problem] = checks.check_server(databases=["default"])
    option = problem.hint.split("'")[1]
    default["OPTIONS"] = {**default["OPTIONS"], "options": f"{default['OPTIONS']['options']} {option}"}
    connection.close()
    assert checks.check_server(databases=["default"]) == []


@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_a_lock_timeout_of_the_database_cuts_no_wait_for_a_lock(setting_of_database, in_threads, eventually, scope):
    """So no check is needed."""
    setting_of_database("lock_timeout", "20ms")
    is_held = threading.Event()

    def somebody_has_waited():
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT FROM pg_locks WHERE NOT granted AND waitstart < clock_timestamp() - interval '50 ms'"
            )
            return cursor.rowcount

    def hold_or_wait(number):
        if number == 0:
            with lock("a", scope="session"):
                is_held.set()
                eventually(somebody_has_waited, why="nobody waited for longer than lock_timeout")
        else:
            is_held.wait(60)
            with lock("a", scope=scope) as handle:
                return handle.waited

    assert in_threads(hold_or_wait, 2)[1] > 0.02


def test_a_deployment_check_reports_a_server_that_waits_for_dead_clients(setting_of_database, default):
    default["OPTIONS"] = {**default["OPTIONS"], "options": ""}
    connection.close()
    assert ids(databases=["default"]) == []
    assert ids(databases=["default"], include_deployment_checks=True) == ["django_pglock.W008"]
    setting_of_database("client_connection_check_interval", "2s")
    assert ids(databases=["default"], include_deployment_checks=True) == []


@pytest.fixture
def no_tasks(monkeypatch):
    """The functions of the test alone: those of other tests have options, too."""
    monkeypatch.setattr(registry, "_definitions", {})


@pytest.mark.usefixtures("no_tasks")
def test_a_check_reports_options_that_a_backend_of_another_package_ignores(settings):
    dummy = f"{BaseTaskBackend.__module__.removesuffix('base')}dummy.DummyBackend"
    settings.TASKS = {**settings.TASKS, "dummy": {"BACKEND": dummy}}
    task(every=60)(scheduled.hourly)
    task(backend="dummy", priority=5)(plain_tasks.nothing.func)
    assert checks.check_options_without_effect() == []
    task(every=60, backend="dummy")(scheduled.nightly)
    task(max_attempts=3, lock="echo:{value}", backend="dummy")(plain_tasks.echo.func)
    [problem] = checks.check_options_without_effect()
    assert problem.id == "django_pglock.W010"
    assert problem.msg == (
        "The backends of these functions in TASKS ignore these options of @task: "
        "tests.sample.scheduled.nightly (every); tests.sample.tasks.echo (lock, max_attempts)."
    )


FORGOTTEN = """
import django
from django.conf import settings
settings.configure(INSTALLED_APPS=["django_pglock", "shop"])
django.setup()
from django_pglock import checks
checks.MOST_NAMED = 1
for problem in checks.check_options_without_effect():
    print(problem.id, problem.msg)
"""
FUNCTIONS = """
from django_pglock import task
@task(max_attempts=3)
def first(): ...
@task(cron="0 3 * * *")
def second(): ...
"""


def test_a_check_reports_that_tasks_is_not_set(tmp_path):
    """Django then runs each task at once, in the caller's process: no lock, no retry, and no schedule."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/__init__.py").touch()
    (tmp_path / "shop/tasks.py").write_text(FUNCTIONS)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = subprocess.check_output([sys.executable, "-c", FORGOTTEN], text=True, env=env)
    assert said == (
        "django_pglock.W010 The settings have no TASKS, so enqueue() calls these functions at once, and ignores these "
        "options of @task: shop.tasks.first (max_attempts); and 1 more.\n"
    )


def test_a_check_reports_a_router_that_excludes_the_tables_of_tasks(settings):
    """migrate succeeds without making the table, and each enqueue() would fail."""
    settings.DATABASE_ROUTERS = [OnlyInOther()]
    [problem] = checks.check_task_databases()
    assert problem.id == "django_pglock.E006"
    assert "TASKS['default']['OPTIONS']['database'] stores tasks in 'default'" in problem.msg
    assert "allow_migrate" in problem.hint
    settings.TASKS = {"default": {**settings.TASKS["default"], "OPTIONS": {"database": "other"}}}
    assert [each.id for each in checks.check_task_databases()] == ["django_pglock.W009"]


class Derived(PostgresBackend):
    """A backend of the project."""


@pytest.mark.parametrize("path", ["django_pglock.backend.PostgresBackend", f"{__name__}.Derived"])
def test_a_check_reports_tasks_in_another_database(settings, path):
    assert checks.check_task_databases() == []
    backend = {**settings.TASKS["default"], "BACKEND": path, "OPTIONS": {"database": "elsewhere"}}
    settings.TASKS = {"default": backend}
    assert [each.id for each in checks.check_task_databases()] == ["django_pglock.W009"]
    assert task_backends


@pytest.mark.usefixtures("no_tasks")
def test_a_check_reports_options_of_retries_without_a_retry():
    """People who come from other queues expect retries as soon as they name an exception."""
    task(retry_on=(OSError,), backoff=5)(plain_tasks.echo.func)
    task(retry_on=(OSError,), max_attempts=2)(plain_tasks.nothing.func)
    [problem] = checks.check_retry_options()
    assert problem.id == "django_pglock.W014"
    assert problem.msg.endswith("because max_attempts is 1: tests.sample.tasks.echo (backoff, retry_on).")
    registry._definitions.clear()
    assert checks.check_retry_options() == []


def test_a_default_of_the_settings_is_no_option_without_effect(own_registry, settings):
    registry._definitions.clear()
    backend = {**settings.TASKS["default"], "OPTIONS": {"defaults": {"backoff": 5, "retry_on": OSError}}}
    settings.TASKS = {"default": backend}
    task(plain_tasks.echo.func)
    assert checks.check_retry_options() == []
