"""One of several databases is silent: it acknowledges, and answers neither statements nor new connections."""

from __future__ import annotations

import pytest
from django.db import connection
from django_pglock.worker.liveness import session_watch

from django_pglock.models import Task
from tests.conftest import NEVER
from tests.proxy import Proxy
from tests.sample import session_tasks as tasks

pytestmark = pytest.mark.acceptance


@pytest.fixture
def proxies(alias):
    """Networks to three aliases of the tests' database, by name. The tests' own connection uses none of them."""
    proxies = {name: Proxy.before(connection) for name in ("reports", "archive", "shop")}
    for name, proxy in proxies.items():
        proxy.start()
        alias(name, HOST="127.0.0.1", PORT=str(proxy.port), CONN_MAX_AGE=None)
    yield proxies
    tasks.GO_ON.set()
    for proxy in proxies.values():
        proxy.stop()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(session_watch, "CHECK_INTERVAL", 0.1)
    monkeypatch.setattr(session_watch, "LONGEST_TRANSIT", 0.5)


@pytest.fixture
def hang(proxies, eventually):
    """Have a task lose its session with an alias. ``new``: so do all sessions that are opened there later."""

    def hang(name, *, new):
        tasks.HAS_BEGUN.clear()
        tasks.GO_ON.clear()
        tasks.ask_in.enqueue(name)
        assert tasks.HAS_BEGUN.wait(NEVER)
        proxies[name].black_hole(new=new)
        tasks.GO_ON.set()

    return hang


def is_done():
    return not Task.objects.exclude(status="SUCCESSFUL").exists()


def test_a_query_of_the_session_watch_does_not_wait_for_another_database(
    proxies, quick, hang, worker, eventually, caplog, monkeypatch
):
    """The queries to the silent databases wait for their answers longer than this test."""
    monkeypatch.setattr(session_watch, "QUESTION_TIMEOUT", 2 * NEVER)
    worker(threads=3)
    for name in ("reports", "archive"):
        hang(name, new=True)
        eventually(lambda name=name: len(proxies[name].links) >= 2, why="the watch does not ask")
    hang("shop", new=False)
    eventually(lambda: "database 'shop'" in caplog.text, why="the thread hangs")
    for proxy in proxies.values():
        proxy.pass_through()
    eventually(is_done, why="a thread hangs")
