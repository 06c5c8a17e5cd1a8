"""Probes of a worker: what makes it live, what makes it ready, and how a child's troubles are seen."""

from __future__ import annotations

import math
import threading

import pytest
from django.db import OperationalError

from django_pglock.models import Task
from django_pglock.worker import service
from django_pglock.worker.child import child as child_module
from tests.db.worker.parent.asking import ask
from tests.db.worker.parent.conftest import terminate
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect
from tests.sample.running_tasks import FOREVER

pytestmark = pytest.mark.django_db(transaction=True)

PARTS = ("settler", "feeder")
ENDS = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def test_a_worker_that_stops_lives_and_is_not_ready(probed, eventually):
    worker = probed()
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists())
    worker.stop()
    eventually(lambda: ask(worker, "/readyz")[:2] == (503, "The worker is stopping.\n"))
    assert ask(worker, "/livez")[0] == 200
    running_tasks.note("go on")
    assert worker.wait()
    assert Task.objects.get().status == "SUCCESSFUL"
    with pytest.raises(ConnectionRefusedError):
        ask(worker, "/livez")


def test_a_loop_that_hangs_is_not_alive(probed, eventually, monkeypatch):
    worker, go_on = probed(), threading.Event()
    worker.loop.call_soon_threadsafe(go_on.wait, FOREVER)
    try:
        eventually(lambda: ask(worker, "/livez")[0] == 503)
        assert "The worker has not responded for" in ask(worker, "/livez")[1]
        assert ask(worker, "/readyz")[0] == 503
        # Nobody would see the death of a child, so the heartbeat does not say that it lives.
        eventually(lambda: not worker.child.heartbeat.is_alive())
    finally:
        go_on.set()
    eventually(lambda: ask(worker, "/livez")[0] == 200)


@pytest.mark.parametrize("name", PARTS)
def test_a_child_whose_part_hangs_is_replaced_and_the_worker_lives(probed, eventually, monkeypatch, caplog, name):
    worker = probed(grace=0.1)
    child, end = worker.child, threading.Event()
    monkeypatch.setattr(getattr(child, name), "run_once", lambda: end.wait(FOREVER))
    monkeypatch.setattr(service, "HUNG_AFTER", 0.05)
    monkeypatch.setattr(child_module, "LAST_WRITES", 0.1)
    getattr(child, name).wake()
    eventually(lambda: worker.child is not child, why="it was not replaced")
    monkeypatch.undo()
    assert f"The {name} has not responded for " in caplog.text
    assert ask(worker, "/livez")[0] == 200
    result = tasks.nothing.enqueue()
    eventually(lambda: Task.objects.get(pk=result.id).status == "SUCCESSFUL")
    end.set()


@ENDS
@pytest.mark.parametrize("name", PARTS)
def test_a_child_whose_part_has_ended_is_replaced(probed, eventually, monkeypatch, caplog, name):
    worker = probed(grace=0.1)
    child = worker.child
    monkeypatch.setattr(child_module, "LAST_WRITES", 0.1)
    monkeypatch.setattr(getattr(child, name), "_run_once_or_back_off", lambda: exec("raise SystemExit"))
    getattr(child, name).wake()
    eventually(lambda: worker.child is not child, why="it was not replaced")
    assert f"The {name} has ended." in caplog.text
    result = tasks.nothing.enqueue()
    eventually(lambda: Task.objects.get(pk=result.id).status == "SUCCESSFUL")


def test_a_child_of_which_a_thread_for_tasks_has_ended_is_replaced(probed, eventually, caplog):
    worker = probed(grace=0.1)
    child = worker.child
    tasks.nothing.enqueue()
    eventually(lambda: Task.objects.get().status == "SUCCESSFUL")
    worker.in_flight.threads.inbox.put(None)
    eventually(lambda: worker.child is not child, why="it was not replaced")
    assert "A thread of the executor has ended." in caplog.text


def test_a_service_that_waits_for_a_silent_server_is_not_stuck(eventually, monkeypatch):
    """Connecting takes as long as the settings of the client allow. A restart of the process would not shorten it."""
    end = threading.Event()

    class Silent:
        def ensure_connection(self):
            end.wait(FOREVER)
            raise OperationalError("no answer")

        connection, execute_wrappers = None, []

        def close(self):
            pass

    monkeypatch.setattr(service, "dedicated_connection", lambda *_, **__: Silent())
    part = service.Service("default")
    part.start()
    eventually(lambda: part.next_report_by == math.inf)
    part.stop()
    end.set()
    assert part.wait(60)


def test_without_a_database_a_worker_lives_and_is_not_ready(probed, eventually, monkeypatch):
    def refuse(*_, **__):
        raise OperationalError("secret.example refuses")

    worker = probed()
    eventually(lambda: ask(worker, "/readyz")[0] == 200)
    monkeypatch.setattr(service, "dedicated_connection", refuse)
    for name in ("heartbeat", "feeder", "settler", "upkeep"):
        terminate(name)
    eventually(lambda: ask(worker, "/readyz")[:2] == (503, "The worker has no connection to the database.\n"))
    assert ask(worker, "/livez")[0] == 200
    monkeypatch.undo()
    eventually(lambda: ask(worker, "/readyz")[0] == 200)
    eventually(lambda: worker.heartbeat.reconnects == 1)
