"""``connection.execute_wrapper`` around and inside of locks, in every order.

Django calls the wrappers in the order of its list ``execute_wrappers`` and takes the last one off at the end of each
``execute_wrapper`` block, whichever that is. A package that leaves one of its own there in between makes the block take
off the wrong one: the audit ends with the wrong block, or never, and the list grows until Python's stack is too small.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection

from django_pglock import lock, try_lock
from qa.foreign.sample.models import Letter
from qa.foreign.sample.tasks import nothing


class Audit:
    """Notes each statement that goes through the wrapper."""

    def __init__(self) -> None:
        self.statements: list[str] = []

    def __call__(self, execute: Any, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        self.statements.append(sql)
        return execute(sql, params, many, context)

    def count(self, text: str) -> int:
        return sum(text in statement for statement in self.statements)


@pytest.fixture
def wrappers() -> list[Any]:
    """Return the wrappers of a connection on which nothing of this test has happened yet."""
    connection.ensure_connection()
    return [*connection.execute_wrappers]


def ask(number: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {number}")


def test_a_lock_may_outlast_the_audit_in_which_it_was_taken(wrappers):
    audit = Audit()
    with connection.execute_wrapper(audit):
        handle = lock("longer").acquire()
        ask(1)
    ask(2)
    handle.assert_held()
    handle.release()
    ask(3)
    assert audit.count("SELECT 1") == 1
    assert audit.count("SELECT 2") == audit.count("SELECT 3") == 0
    assert connection.execute_wrappers == wrappers


def test_an_audit_may_outlast_the_lock_in_which_it_began(wrappers):
    audit, block = Audit(), ExitStack()
    handle = lock("shorter").acquire()
    block.enter_context(connection.execute_wrapper(audit))
    handle.release()
    ask(1)
    block.close()
    ask(2)
    assert audit.count("pg_advisory_unlock") == 1
    assert audit.count("SELECT 1") == 1
    assert audit.count("SELECT 2") == 0
    assert connection.execute_wrappers == wrappers


@pytest.mark.parametrize("order", ["lock audit lock", "audit lock audit", "lock lock audit", "audit audit lock"])
def test_nested_locks_and_audits_end_in_any_order(wrappers, order):
    audits: list[Audit] = []
    with ExitStack() as blocks:
        for number, kind in enumerate(order.split()):
            if kind == "lock":
                blocks.enter_context(lock("nested", number))
            else:
                audits.append(Audit())
                blocks.enter_context(connection.execute_wrapper(audits[-1]))
            ask(number)
    ask(9)
    assert [audit.count("SELECT 9") for audit in audits] == [0] * len(audits)
    assert all(audit.count("SELECT 2") == 1 for audit in audits)
    assert connection.execute_wrappers == wrappers


def test_an_audit_continues_when_the_connection_is_closed_below_a_lock(wrappers):
    audit = Audit()
    with connection.execute_wrapper(audit):
        handle = lock("lost").acquire()
        connection.close()
        with pytest.raises(Exception, match="lost"):
            handle.release()
        ask(1)
    ask(2)
    assert audit.count("SELECT 1") == 1
    assert audit.count("SELECT 2") == 0
    assert connection.execute_wrappers == wrappers


def test_an_audit_works_if_the_connection_is_opened_inside_of_it():
    audit = Audit()

    def work() -> list[Any]:
        # A new thread has a connection object that was never opened.
        with connection.execute_wrapper(audit):
            ask(1)
            handle = lock("first").acquire()
        ask(2)
        handle.release()
        left = [*connection.execute_wrappers]
        connection.close()
        return left

    with ThreadPoolExecutor(1) as thread:
        assert audit not in thread.submit(work).result()
    assert audit.count("SELECT 1") == 1
    assert audit.count("SELECT 2") == 0


def test_a_wrapper_that_forbids_statements_forbids_ours(wrappers):
    def forbid(*args: Any) -> None:
        raise ImproperlyConfigured("no statements here")

    with connection.execute_wrapper(forbid):
        with pytest.raises(ImproperlyConfigured), lock("forbidden"):
            pass
        with pytest.raises(ImproperlyConfigured):
            nothing.enqueue()
    with try_lock("forbidden") as held:
        assert held
    assert connection.execute_wrappers == wrappers


def test_a_wrapper_may_change_what_is_sent(wrappers):
    def mark(execute: Any, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        return execute(f"/* marked */ {sql}", params, many, context)

    audit = Audit()
    with connection.execute_wrapper(mark), connection.execute_wrapper(audit), lock("marked", "100%"):
        nothing.enqueue("100% of %s and %(name)s")
        assert Letter.objects.filter(text="100%").count() == 0
    assert all("/* marked */" in statement for statement in audit.statements)
    assert connection.execute_wrappers == wrappers
