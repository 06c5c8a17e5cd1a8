"""Tasks in another database than the default one: the commands go there by themselves, the admin by a router."""

from __future__ import annotations

import sys
import types
from contextlib import suppress

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connections, transaction

from django_pglock import LockNotAvailable, LockScopeError, lock
from django_pglock.models import AdvisoryLock, Task
from django_pglock.tasks.compat import task_finished
from tests.conftest import NEVER, ROOT
from tests.docs.test_docs import blocks
from tests.sample import session_tasks, tasks
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.acceptance

OURS = "django_pglock.backend.PostgresBackend"


@pytest.fixture
def tasks_elsewhere(alias, settings):
    """Tables of its own for the alias "tasks", which is the one that TASKS names."""
    execute_sql("CREATE SCHEMA elsewhere")
    alias("tasks", OPTIONS={"options": "-c search_path=elsewhere"})
    call_command("migrate", "django_pglock", database="tasks", verbosity=0)
    settings.TASKS = {"default": {"BACKEND": OURS, "QUEUES": [], "OPTIONS": {"database": "tasks"}}}
    yield
    execute_sql("DROP SCHEMA elsewhere CASCADE")


@pytest.fixture
def page(monkeypatch):
    """The code of the page about several databases, as a module."""
    module = types.ModuleType("page_about_databases")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in blocks(ROOT / "docs" / "worker.md", "python", under="Keep tasks in a database of their own"):
        exec(code, vars(module))
    return module


class ReadsElsewhere:
    """As with a replica, which follows a moment later."""

    def db_for_read(self, model, **hints):
        return "replica"


@pytest.mark.usefixtures("own_registry", "tasks_elsewhere")
def test_the_example_of_the_page_enqueues_after_the_commit_in_the_other_database(page, settings, in_threads):
    settings.DATABASE_ROUTERS = page.DATABASE_ROUTERS
    assert page.TASKS["default"]["OPTIONS"] == settings.TASKS["default"]["OPTIONS"]
    with suppress(ZeroDivisionError), transaction.atomic():
        page.sign_up("nobody")
        raise ZeroDivisionError
    assert not Task.objects.exists(), "or somebody who is not there would be welcomed"
    with transaction.atomic():
        page.sign_up("Ann")
        assert not Task.objects.exists()
    assert Task.objects.using("tasks").get().args == ["Ann"]
    with transaction.atomic(using="tasks"), lock("queue-report", using="tasks"):
        assert AdvisoryLock.objects.using("tasks").for_name("queue-report").held().exists()
        with pytest.raises(LockNotAvailable):
            in_threads(lambda number: page.rebuild_queue_report(timeout=0), 1)
    page.rebuild_queue_report()
    User.objects.all().delete()


def test_a_lock_without_scope_inside_atomic_of_another_database_is_refused(alias, somebody):
    """The lock would be released before the COMMIT of that database."""
    second = alias("second")
    with transaction.atomic(using=second):
        with pytest.raises(LockScopeError, match="using='second'"):
            lock("a").acquire()
        with lock("a", using="default") as handle:
            assert handle.scope == "session"
        with lock("b", using=second) as handle:
            assert handle.scope == "transaction"
        assert not somebody.can_have("b")
        with lock("c", scope="session"):
            pass
        with transaction.atomic(), lock("d") as handle:
            assert handle.scope == "transaction"
    assert somebody.can_have("b")


def test_a_transaction_left_open_in_another_database_is_not_the_next_tasks(alias, worker, eventually):
    """Each connection of the thread is checked, not only that of the database of the tasks."""
    alias("other", CONN_MAX_AGE=None)
    running = worker(threads=1)
    session_tasks.write_to.enqueue("other")
    session_tasks.leave.enqueue("a BEGIN in another database")
    session_tasks.write_to.enqueue("other")
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 3)
    eventually(lambda: not running.in_flight.claims)
    assert Effect.objects.filter(name="kept").count() == 2


def test_results_and_attempts_are_read_where_the_task_was_written(alias, worker, eventually, settings):
    """The replica cannot be reached, so each read of it is an error."""
    alias("replica", HOST="/nowhere")
    settings.DATABASE_ROUTERS = [ReadsElsewhere()]
    failing, returning = tasks.fail.enqueue("no"), tasks.echo.enqueue("yes")
    worker(threads=1)
    assert returning.wait(NEVER).return_value == "yes"

    def has_failed():
        failing.refresh()
        return failing.status == "FAILED"

    eventually(has_failed)
    assert [each.exception_class_path for each in failing.errors] == ["builtins.ValueError"]
    found = tasks.fail.get_result(failing.id)
    assert (found.status, len(found.errors), found.attempts) == ("FAILED", 1, 1)
    assert tasks.echo.get_result(returning.id).return_value == "yes"


def test_receivers_get_a_new_connection_after_the_loss_of_theirs(alias, worker, eventually):
    """The connection is to another database than that of the tasks. Before, each later call failed."""
    alias("second", CONN_MAX_AGE=None)
    backends = []

    def note(**kwargs):
        with connections["second"].cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            backends.append(cursor.fetchone()[0])
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    task_finished.connect(note)
    try:
        worker()
        for number in (1, 2, 3):
            tasks.nothing.enqueue()
            eventually(lambda number=number: len(backends) == number, why="the receiver has no connection")
    finally:
        task_finished.disconnect(note)
    assert len(set(backends)) == 3
