"""The progress that running tasks report is written while they run, and once more at their end."""

from __future__ import annotations

import time

import pytest

from django_pglock.conf import get_settings
from django_pglock.models import Task
from django_pglock.store import settle
from django_pglock.store.requests_to_worker import write_progress
from django_pglock.worker.child import in_flight
from tests.db.worker.conftest import wait_for_end
from tests.sample import running_tasks as running
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def progress_of(result):
    return Task.objects.values_list("progress", flat=True).get(pk=result.id)


@pytest.fixture
def progress_statements(monkeypatch):
    """The statements that write progress."""
    written = []

    def count(using, claims, **options):
        if claims:
            written.append([claim.progress for claim in claims])
        write_progress(using, claims, **options)

    for module in (settle, in_flight):
        monkeypatch.setattr(module, "write_progress", count)
    return written


@pytest.mark.parametrize("function", ["tell", "tell_atomically"])
def test_progress_shows_while_the_task_runs(worker, eventually, function):
    """Also while the transaction of an atomic task is open: the worker writes progress in another session."""
    worker()
    arguments = (3, 3) if function == "tell" else (3,)
    result = getattr(running, function).enqueue(*arguments)
    told = {"done": 3, "total": 3} if function == "tell" else {"done": 1, "total": 2}
    eventually(lambda: progress_of(result) == told, why="it was not told")
    assert Task.objects.get(pk=result.id).status == "RUNNING"
    assert wait_for_end(result, eventually).status == "SUCCESSFUL"


LAST = {
    "success": (lambda: running.tell.enqueue(1000), "SUCCESSFUL", {"done": 1000, "total": 1000}),
    "atomic success": (lambda: running.tell_atomically.enqueue(), "SUCCESSFUL", {"done": 2, "total": 2}),
    "failure": (lambda: running.tell_and_fail.enqueue(7.5), "FAILED", {"done": 7.5, "total": None}),
}


@pytest.mark.parametrize("end", LAST)
def test_the_last_progress_of_a_task_is_stored(worker, eventually, end):
    worker()
    enqueue, *expected = LAST[end]
    row = wait_for_end(enqueue(), eventually)
    assert [row.status, row.progress] == expected


def test_progress_sends_one_statement_a_heartbeat_and_one_at_the_end(worker, eventually, progress_statements):
    worker()
    began = time.monotonic()
    wait_for_end(running.tell.enqueue(10_000), eventually)
    heartbeats = (time.monotonic() - began) / get_settings().HEARTBEAT_INTERVAL
    assert 1 <= len(progress_statements) <= 2 + heartbeats
    assert progress_statements[-1] == ['{"done":10000,"total":10000}']


def test_tasks_without_progress_send_no_statement_for_it(worker, eventually, progress_statements):
    worker()
    for result in [tasks.nothing.enqueue(), tasks.record_atomically.enqueue("x"), tasks.fail.enqueue()]:
        wait_for_end(result, eventually)
    assert progress_statements == []
