"""What a task leaves of its thread's connections, in whatever state, never reaches the next task."""

from __future__ import annotations

import pytest
from django.db import connections

from django_pglock.models import Task
from django_pglock.worker.running import executor
from tests.sample import session_tasks as tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def kept_connections(monkeypatch):
    """Connections that threads keep, and that nobody looks at but after each task."""
    monkeypatch.setattr(executor, "CHECK_INTERVAL", 1e9)
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)


def is_over():
    return not Task.objects.filter(status__in=("READY", "RUNNING")).exists()


@pytest.mark.parametrize("what", [what for what in tasks.LEAVE if "another" not in what])
def test_the_next_task_has_a_connection_at_rest(worker, eventually, caplog, what):
    """A BEGIN that Django does not know of made later tasks successful, and lost what they wrote without a word."""
    worker(threads=1)
    tasks.write_to.enqueue("default")
    tasks.leave.enqueue(what)
    tasks.write_to.enqueue("default")
    eventually(is_over)
    assert set(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}
    assert Effect.objects.count() == 2
    assert ("has left a transaction open" in caplog.text) == (what != "a closed connection")


def test_a_connection_at_rest_is_kept(worker, eventually):
    worker(threads=1)
    for _ in range(3):
        tasks.tell_backend.enqueue()
    eventually(is_over)
    assert len(set(Task.objects.values_list("result", flat=True))) == 1
