"""Which threads and coroutines wait for an answer of the server, and for the answer to which statement."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager

import pytest
from django.db import connection, connections

from django_pglock.postgres.async_sessions import open_session
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


def test_the_next_wait_of_a_session_does_not_continue_the_one_before_it(somebody, eventually):
    """The session of a thread that sends many quick statements must not count as half open."""
    numbers = (1, 2)
    for number in numbers:
        somebody.ask("SELECT pg_advisory_lock(%s)", number)

    def wait_for_each():
        with connection.cursor() as cursor:
            for number in numbers:
                cursor.execute("SELECT pg_advisory_xact_lock(%s)", [number])
        connections.close_all()

    def seen_at(number):
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = %s"
        eventually(lambda: somebody.ask(waiting, number))
        [wait] = eventually(lambda: [each for each in pending_statements() if each.thread == "waits"])
        somebody.ask("SELECT pg_advisory_unlock(%s)", number)
        return wait

    thread = threading.Thread(target=wait_for_each, name="waits")
    thread.start()
    first, second = map(seen_at, numbers)
    thread.join(NEVER)
    assert first.raw is second.raw
    assert not second.continues(first)


def test_a_coroutine_that_waits_has_no_thread(held):
    async def main():
        session = await open_session("default")
        sending = asyncio.create_task(session.send(WAIT))
        deadline = time.monotonic() + NEVER
        while not (found := of(session.raw)):
            assert time.monotonic() < deadline, "the coroutine is not found"
            await asyncio.sleep(0.01)
        await asyncio.to_thread(held)
        await sending
        left = of(session.raw)
        session.end()
        return found, left

    [waits], left = asyncio.run(main())
    assert (waits.alias, waits.thread, waits.ident) == ("default", None, None)
    assert left == []
