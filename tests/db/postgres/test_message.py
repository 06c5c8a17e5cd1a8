"""Statements are sent below Django's cursor only if no other package observes it."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.db.backends.postgresql.base import DatabaseWrapper

from django_pglock import LockLost, LockNotAvailable, lock, try_lock
from django_pglock.postgres.message import is_plain_django
from django_pglock.postgres.sessions import dedicated_connection
from tests.db.locks.sessions import advisory_rows
from tests.sample.tasks import nothing

pytestmark = pytest.mark.django_db(transaction=True)


class Counting(DatabaseWrapper):
    """A backend that sees each statement, as django-tenants' and django-prometheus' do."""

    seen = 0

    def create_cursor(self, name=None):
        Counting.seen += 1
        return super().create_cursor(name)


@pytest.fixture
def with_backend(monkeypatch):
    """Replace the backend of the alias during a block."""
    made = []

    def use(backend):
        settings = connections["default"].settings_dict
        mine = backend(settings, alias="default")
        made.append(mine)
        before = connections["default"]
        connections["default"] = mine
        made.append(before)
        return mine

    yield use
    connections["default"] = made[1]
    made[0].close()


def test_a_backend_with_a_cursor_of_its_own_sees_every_statement(with_backend):
    mine = with_backend(Counting)
    Counting.seen = 0
    with lock("a", timeout=1):
        pass
    assert Counting.seen == 2
    assert not is_plain_django(mine)


@pytest.fixture
def audit():
    """A wrapper that notes each statement in ``audit.seen``."""

    def note(execute, sql, params, many, context):
        note.seen.append(sql)
        return execute(sql, params, many, context)

    note.seen = []
    return note


def test_a_lock_leaves_the_execute_wrappers_of_others(audit):
    """``execute_wrapper()`` removes the last wrapper of the list at its end. That must be its own wrapper."""
    connection = connections["default"]
    connection.close()
    for _ in range(3):
        with connection.execute_wrapper(audit):
            kept = lock("a").acquire()
        assert audit not in connection.execute_wrappers
        with connection.execute_wrapper(audit):
            kept.release()
        assert connection.execute_wrappers == []
    with lock("b"), connection.execute_wrapper(audit), connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    assert audit.seen[-1].startswith("SELECT 1"), "others may look at how a statement begins"
    assert "%" not in "".join(audit.seen)


def test_an_audit_continues_when_the_connection_is_closed_below_a_lock(audit):
    connection = connections["default"]
    connection.ensure_connection()
    before = [*connection.execute_wrappers]
    with connection.execute_wrapper(audit):
        handle = lock("lost").acquire()
        connection.close()
        with pytest.raises(LockLost):
            handle.release()
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    assert audit.seen[-1].startswith("SELECT 1")
    assert connection.execute_wrappers == before


def test_a_wrapper_that_forbids_statements_forbids_ours():
    def forbid(*arguments):
        raise ImproperlyConfigured("no statements here")

    with connections["default"].execute_wrapper(forbid):
        with pytest.raises(ImproperlyConfigured), lock("forbidden"):
            pass
        with pytest.raises(ImproperlyConfigured):
            nothing.enqueue()
    with try_lock("forbidden") as held:
        assert held


def test_locks_work_inside_a_pipeline_of_psycopg(somebody):
    connection = connections["default"]
    connection.ensure_connection()
    somebody.holds("busy")
    with connection.connection.pipeline():
        with lock("a", timeout=1) as handle, lock("b"):
            assert not somebody.can_have("a")
            assert handle
        with try_lock("busy") as held:
            assert not held
        with pytest.raises(LockNotAvailable):
            lock("busy", timeout=0.01).acquire()
        assert somebody.can_have("a")
    with transaction.atomic(), connection.connection.pipeline():
        with lock("a", timeout=1), lock("b"):
            pass
        with pytest.raises(LockNotAvailable):
            lock("busy", timeout=0.01).acquire()
        assert not somebody.can_have("a")
    assert advisory_rows() == 0


def test_notifications_that_arrive_with_an_answer_of_ours_are_passed_on(somebody):
    connection = connections["default"]
    heard = []
    with connection.cursor() as cursor:
        cursor.execute("LISTEN heard")
    connection.connection.add_notify_handler(lambda notification: heard.append(notification.payload))
    somebody.connection.ensure_connection()
    with somebody.connection.cursor() as cursor:
        cursor.execute("NOTIFY heard, 'news'")
    with lock("a"):
        pass
    assert heard == ["news"]
    connection.close()


def test_sessions_of_our_own_are_read_committed_whatever_the_role_says():
    with connections["default"].cursor() as cursor:
        cursor.execute("ALTER ROLE CURRENT_USER SET default_transaction_isolation = 'serializable'")
    connection = dedicated_connection("default")
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            connection.set_autocommit(False)
            cursor.execute("SHOW transaction_isolation")
            assert cursor.fetchone() == ("read committed",)
    finally:
        connection.close()
        with connections["default"].cursor() as cursor:
            cursor.execute("ALTER ROLE CURRENT_USER RESET default_transaction_isolation")
