"""Fixtures for the tests of the store."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock.models import Waiter
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store import await_end
from tests.db.store.waiting import listener_threads, sessions
from tests.sample.models import Letter


@pytest.fixture
def session():
    """A session of another program, which can hold the lock of a worker."""
    connection = dedicated_connection("default")
    yield connection
    connection.close()


@pytest.fixture
def without_indexes(db):
    """Have the server read whole tables, in the order of their rows: an order must not depend on the plan.

    The settings end with the test, as all settings of its session do.
    """
    with connection.cursor() as cursor:
        for scan in ("indexscan", "indexonlyscan", "bitmapscan"):
            cursor.execute(f"SET enable_{scan} = off")


@pytest.fixture
def nothing_is_left(eventually):
    yield
    eventually(lambda: sessions() == 0, why="a session is left")
    eventually(lambda: not Waiter.objects.exists(), why="rows are left")
    eventually(lambda: not listener_threads(), why="a thread is left")
    assert not await_end._listeners


@pytest.fixture
def letters():
    return Letter.objects.bulk_create(Letter(text=f"letter {n}", urgency=n % 3) for n in range(10))
