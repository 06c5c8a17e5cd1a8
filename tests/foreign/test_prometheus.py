"""django-prometheus: its cursor class counts each statement, and its backend class each connection.

The class comes in by ``cursor_factory`` in ``get_connection_params()``, so a statement below the cursor is not counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from django.db import connection, transaction
from django.test import Client
from prometheus_client import REGISTRY

from django_pglock import Lease, LockNotAvailable, enqueue_many, lock, lock_all, semaphore
from django_pglock.testing import hold
from tests.foreign.sample.tasks import nothing

LABELS = {"alias": "default", "vendor": "postgresql"}


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"django_db_{name}", {**LABELS, **labels}) or 0.0


def counted(function: Callable[[], object], name: str = "execute_total", **labels: str) -> float:
    """Return by how much a counter grows."""
    connection.ensure_connection()
    before = value(name, **labels)
    function()
    return value(name, **labels) - before


def take(number: int = 0) -> None:
    with lock("counted", number):
        pass


def take_in_transaction() -> None:
    with transaction.atomic(), lock("counted"):
        pass


def take_several() -> None:
    with lock_all("counted", "and this"), semaphore("slots", limit=2):
        pass


@pytest.mark.parametrize(
    ("function", "statements"),
    [
        (take, 2),
        (take_in_transaction, 1),
        (take_several, 4),
        (nothing.enqueue, 1),
        (lambda: enqueue_many(nothing, [{"number": number} for number in range(10)]), 1),
    ],
    ids=["lock", "lock in a transaction", "several locks", "enqueue", "enqueue_many"],
)
def test_statements_are_counted(function, statements):
    function()  # what is asked once for a while, such as whether a worker sleeps, is asked here
    assert counted(function) >= statements


def test_two_hundred_of_two_hundred_are_counted():
    def work() -> None:
        for number in range(100):
            take(number)
            nothing.enqueue(number)

    assert counted(work) >= 300
    assert counted(work, "query_duration_seconds_count") >= 300


def test_an_error_is_counted_by_its_type():
    def fail() -> None:
        with hold("busy"), pytest.raises(LockNotAvailable), lock("busy", timeout=0.01):
            pass

    # PostgreSQL says 55P03 when lock_timeout is over.
    assert counted(fail, "errors_total", type="LockNotAvailable") == 1


def test_each_session_is_counted():
    async def take_it() -> None:
        async with lock("asynchronous"):
            pass

    def take_lease() -> None:
        with Lease("counted", ttl=60):
            pass

    assert counted(take_lease, "new_connections_total") >= 1
    assert counted(lambda: asyncio.run(take_it()), "new_connections_total") == 1


def test_the_sessions_and_statements_of_a_worker_are_counted(drain):
    results = [nothing.enqueue() for _ in range(3)]
    before = value("execute_total")
    assert counted(drain, "new_connections_total") >= 3
    assert value("execute_total") - before >= 2
    for result in results:
        result.refresh()
        assert result.status == "SUCCESSFUL"


def test_a_request_is_measured_as_ever():
    assert counted(lambda: Client().get("/post/")) >= 4
    assert REGISTRY.get_sample_value(
        "django_http_responses_total_by_status_view_method_total",
        {"status": "200", "view": "tests.foreign.sample.urls.post", "method": "GET"},
    )
