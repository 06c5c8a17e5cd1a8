"""How the tests of coroutines read locks and sessions without blocking the event loop."""

from __future__ import annotations

import asyncio
import time

from django.db import connection

from tests.sql import execute_sql


def rows():
    """Return (granted, waiting) of all advisory locks in this database."""
    [row] = execute_sql(
        "SELECT count(*) FILTER (WHERE granted), count(*) FILTER (WHERE NOT granted) FROM pg_locks"
        " WHERE locktype = 'advisory'"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    return row


async def arows():
    return await asyncio.to_thread(_closing, rows)


def _closing(function):
    """Query with the Django connection of a thread, and close it, because no other code does."""
    try:
        return function()
    finally:
        connection.close()


async def until(predicate, why):
    deadline = time.monotonic() + 60
    while not await predicate():
        assert time.monotonic() < deadline, why
        await asyncio.sleep(0.01)


async def some_wait():
    return (await arows())[1] > 0


async def _is(function, value):
    return await function() == value


def sessions():
    [row] = execute_sql(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    return row[0]


async def asessions():
    return await asyncio.to_thread(_closing, sessions)


def lock_sessions():
    """Return how many sessions of coroutines' locks there are."""
    [row] = execute_sql(
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_%advisory%' AND pid <> pg_backend_pid()"
    )
    return row[0]


async def asessions_of_locks():
    return await asyncio.to_thread(_closing, lock_sessions)


def _asks(name):
    [row] = execute_sql(
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE %s AND pid <> pg_backend_pid()",
        [f"%django_pglock:% {name} */%"],
    )
    return row[0]


async def asks(name):
    """Return whether the last statement of a session names a lock."""
    return await asyncio.to_thread(_closing, lambda: _asks(name))


async def in_a_task(make):
    """Take a lock as a coroutine of its own."""
    return await asyncio.create_task(make.aacquire())
