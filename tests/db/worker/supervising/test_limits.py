"""The limits of a worker process: it ends after a number of tasks, or a size of memory."""

from __future__ import annotations

import socket

import pytest

from django_pglock.worker.supervising.channel import REPLACE, SupervisorSockets
from tests.conftest import NEVER
from tests.db.worker.conftest import run_to_its_end, statuses
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


def test_a_worker_ends_after_max_tasks():
    for number in range(10):
        tasks.record.enqueue("counted", number)
    run_to_its_end(max_tasks=3)
    assert statuses() == {"READY": 7, "SUCCESSFUL": 3}


def test_a_worker_asks_for_a_replacement_as_soon_as_it_has_claimed_its_last_task(worker, eventually, request):
    """Long before the task has ended, so that the replacement starts early."""
    ours, theirs = socket.socketpair()
    request.addfinalizer(ours.close)
    request.addfinalizer(theirs.close)
    ours.settimeout(NEVER)
    worker(max_tasks=1, supervisor=SupervisorSockets(1, theirs))
    running_tasks.wait_for_note.enqueue("go on")
    while REPLACE not in ours.recv(1024):
        pass
    assert statuses() == {"RUNNING": 1}
    Effect.objects.create(name="go on")
    eventually(lambda: statuses() == {"SUCCESSFUL": 1})


def test_a_worker_ends_at_max_memory(caplog):
    tasks.record.enqueue("one task, at least, before memory is looked at")
    with caplog.at_level("INFO", logger="django_pglock"):
        run_to_its_end(max_memory=1)
    assert "ends: it" in caplog.text
