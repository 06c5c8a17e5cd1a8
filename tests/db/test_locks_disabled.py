"""Tests of projects that disable locks."""

from __future__ import annotations

import asyncio

import pytest
from django.db import connection
from django.http import StreamingHttpResponse
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext

from django_pglock import LockError, LockNotAvailable, lock, lock_all, lock_view, semaphore, try_lock
from django_pglock.testing import assert_no_locks, hold, locks_disabled

pytestmark = pytest.mark.django_db(transaction=True)


def test_every_lock_is_granted_without_a_query():
    with hold("a"), CaptureQueriesContext(connection) as queries, locks_disabled():
        with lock("a", timeout=0) as handle, try_lock("a") as held, lock_all("a", "b"), semaphore("s", limit=1):
            assert held
            handle.assert_held()
        with pytest.raises(LockError, match="not held"):
            handle.release()

        @lock("a:{x}", timeout=0)
        def double(x):
            return 2 * x

        assert double(2) == 4
        asyncio.run(from_coroutine())
    assert len(queries) == 0
    with hold("a"), pytest.raises(LockNotAvailable), lock("a", timeout=0):
        pass
    assert_no_locks()


async def from_coroutine():
    async with lock("a", timeout=0) as handle:
        handle.assert_held()


def test_a_view_may_stream():
    @lock_view("stream")
    def stream(request):
        return StreamingHttpResponse(iter([b"a", b"b"]))

    with hold("stream"), locks_disabled():
        response = stream(RequestFactory().get("/"))
        assert response.getvalue() == b"ab"
        response.close()
