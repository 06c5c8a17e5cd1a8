"""One of several databases is silent: it acknowledges, and answers neither statements nor new connections."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock.models import Attempt, Task
from tests.conftest import NEVER
from tests.proxy import Proxy
from tests.sample import session_tasks as tasks

pytestmark = pytest.mark.acceptance


@pytest.fixture
def proxies(alias):
    """Networks to two aliases of the tests' database, by name. The tests' own connection uses none of them."""
    proxies = {name: Proxy.before(connection) for name in ("reports", "archive")}
    for name, proxy in proxies.items():
        proxy.start()
        alias(name, HOST="127.0.0.1", PORT=str(proxy.port), CONN_MAX_AGE=None)
    yield proxies
    tasks.GO_ON.set()
    for proxy in proxies.values():
        proxy.stop()


def test_timeouts_end_waits_for_several_silent_databases(proxies, worker, eventually):
    """A connection is closed ten seconds after the timeout, so the grace period is longer: no child is replaced."""
    worker(threads=3, grace=NEVER)
    for name, proxy in proxies.items():
        tasks.HAS_BEGUN.clear()
        tasks.GO_ON.clear()
        tasks.ask_in.using(timeout=1, max_attempts=1).enqueue(name)
        assert tasks.HAS_BEGUN.wait(NEVER)
        proxy.black_hole(new=True)
        tasks.GO_ON.set()
    tasks.read.enqueue()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 1, why="all threads hang")
    eventually(lambda: Task.objects.filter(status="FAILED").count() == 2, why="a thread hangs")
    assert {row.exception_path for row in Attempt.objects.all()} == {"django_pglock.errors.TaskTimeout"}
