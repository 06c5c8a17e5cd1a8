"""Half-open connections of task threads: a timeout ends the wait for an answer that does not come."""

from __future__ import annotations

import pytest
from django.db import connection, connections

from django_pglock.models import Attempt, Task
from django_pglock.postgres.connections import has_statement_in_progress
from django_pglock.worker.child import runners
from tests.conftest import NEVER
from tests.proxy import Proxy
from tests.sample import session_tasks as tasks

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


@pytest.fixture(autouse=True)
def events():
    tasks.HAS_BEGUN.clear()
    tasks.GO_ON.clear()
    yield
    tasks.GO_ON.set()


@pytest.fixture
def proxy(transactional_db, monkeypatch):
    """A network between the server and all connections but the tests' own, which is open by now."""
    with Proxy.before(connection) as proxy:
        for name, value in {"HOST": "127.0.0.1", "PORT": str(proxy.port), "CONN_MAX_AGE": None}.items():
            monkeypatch.setitem(connections.settings["default"], name, value)
        yield proxy


def is_done():
    return not Task.objects.exclude(status="SUCCESSFUL").exists()


@pytest.fixture
def begin(proxy, worker, eventually):
    """Start a worker with one thread, which has its session, and a task in it that pauses."""
    worker(threads=1)
    tasks.write.enqueue()
    eventually(is_done)
    tasks.HAS_BEGUN.clear()
    tasks.GO_ON.clear()
    tasks.ask_twice_in_time.enqueue()
    assert tasks.HAS_BEGUN.wait(NEVER)


def test_a_timeout_ends_the_wait_where_the_server_has_nothing_to_cancel(begin, proxy, eventually, caplog, monkeypatch):
    monkeypatch.setattr(runners, "CANCEL_GRACE_PERIOD", 1.0)
    # The request goes to the server, which has nothing to cancel. (The proxy would answer it with a reset.)
    monkeypatch.setattr(runners, "cancel_statement", has_statement_in_progress)
    proxy.black_hole(new=False)
    tasks.GO_ON.set()
    eventually(is_done, why="the thread hangs")
    assert [row.exception_path for row in Attempt.objects.all()] == ["django_pglock.errors.TaskTimeout"]
    assert "does not end although the server was asked to cancel it" in caplog.text


def test_a_timeout_ends_the_wait_where_the_cancel_does_not_arrive(begin, proxy, eventually, caplog, monkeypatch):
    proxy.black_hole(new=False)
    tasks.GO_ON.set()
    eventually(is_done, why="the thread hangs")
    assert "could not be cancelled" in caplog.text
