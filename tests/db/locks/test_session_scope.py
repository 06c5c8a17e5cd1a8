"""Session locks: one statement each, and nothing held after an error."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connection

from django_pglock import LockLost, lock, lock_all
from django_pglock.keys import make_key
from django_pglock.locks.request import Request, in_order
from django_pglock.locks.statements import free_if_held_statement
from tests.db.locks.sessions import advisory_rows, statements_of
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def test_errors_that_are_not_busy_pass_through_and_leave_nothing_held(somebody):
    """The statement_timeout of the operator ends a wait without limit. This does not mean that the lock is busy."""
    somebody.holds("a")
    execute_sql("SET statement_timeout = '50ms'")
    with pytest.raises(OperationalError, match="statement timeout"), lock("a"):
        pass
    assert advisory_rows() == 0
    connection.close()


@pytest.mark.parametrize("timeout", [None, 0, 5])
def test_one_statement_acquires_and_one_frees(timeout):
    def use():
        with lock("a", timeout=timeout):
            pass

    assert statements_of(use) == 2


def test_an_error_in_the_middle_leaves_none(somebody):
    somebody.holds("b")
    execute_sql("SET statement_timeout = '50ms'")
    with pytest.raises(OperationalError, match="statement timeout"), lock_all("a", "b", "c"):
        pass
    assert advisory_rows() == 0
    connection.close()


def test_after_an_error_only_those_locks_of_the_request_are_freed_that_the_session_has():
    """For others the server would warn, and it would free a lock of another handle."""
    notices = []
    connection.ensure_connection()
    connection.connection.add_notice_handler(handler := notices.append)
    request = Request(in_order([make_key("a"), make_key("b")]))
    try:
        with lock("other"), connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s)", [make_key("b").number])
            cursor.execute(free_if_held_statement(request))
            assert advisory_rows() == 1
    finally:
        connection.connection.remove_notice_handler(handler)
    assert notices == []


def test_after_an_error_the_session_ends_if_its_locks_cannot_be_told_apart(somebody, eventually):
    """The server does not say how often a session holds a lock."""
    somebody.holds("b")
    with pytest.raises(LockLost, match="connection was closed"), lock("a"):
        execute_sql("SET statement_timeout = '50ms'")
        with pytest.raises(OperationalError, match="statement timeout"), lock_all("a", "b"):
            pass
        eventually(lambda: somebody.can_have("a"))
