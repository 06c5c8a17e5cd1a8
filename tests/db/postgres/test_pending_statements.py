"""Which threads and coroutines wait for an answer of the server, and for the answer to which statement."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
from django.db import connection, connections

from django_pglock.postgres.connection_registry import register_connection
from django_pglock.postgres.pending_statements import pending_statements
from tests.conftest import NEVER

pytestmark = pytest.mark.django_db(transaction=True)

WAIT = "SELECT pg_advisory_xact_lock(4711)"


@pytest.fixture
def held(somebody):
    """Another session holds the lock for which the statements of these tests wait. Call this to let them end."""
    somebody.ask("SELECT pg_advisory_lock(4711)")
    return lambda: somebody.ask("SELECT pg_advisory_unlock(4711)")


@contextmanager
def waiting_thread(release, *, through_django):
    """Yield the psycopg connection of a thread named "waits", and the thread."""
    opened, found = threading.Event(), []

    def wait():
        register_connection(connections["default"])
        connection.ensure_connection()
        found.append(connection.connection)
        opened.set()
        try:
            if through_django:
                with connection.cursor() as cursor:
                    cursor.execute(WAIT)
            else:
                connection.connection.execute(WAIT)
        finally:
            connections.close_all()

    thread = threading.Thread(target=wait, name="waits")
    thread.start()
    try:
        assert opened.wait(NEVER)
        yield found[0], thread
    finally:
        release()
        thread.join(NEVER)


def of(raw):
    return [each for each in pending_statements() if each.raw is raw]


@pytest.mark.parametrize("through_django", [True, False])
def test_a_thread_that_waits_is_named_with_its_connection(held, eventually, through_django):
    with waiting_thread(held, through_django=through_django) as (raw, thread):
        [waits] = eventually(lambda: of(raw))
        assert (waits.alias, waits.thread, waits.ident) == ("default", "waits", thread.ident)
        assert of(raw)[0].continues(waits), "it is the same wait"
    assert of(raw) == []
