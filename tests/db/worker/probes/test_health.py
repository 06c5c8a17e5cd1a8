"""Probes name the part of a worker that does not work, and a part that waits is none."""

from __future__ import annotations

import math
import re
import threading

import pytest
from django.db import OperationalError, connection

from django_pglock.models import Task
from django_pglock.worker import service
from django_pglock.worker.probes import health
from tests.db.worker.probes.asking import ask, metrics
from tests.sample import running_tasks
from tests.sample.models import Effect
from tests.sample.running_tasks import FOREVER

pytestmark = pytest.mark.django_db(transaction=True)


PARTS = ("heartbeat", "settler", "upkeep", "fetcher")


ENDS = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def test_a_worker_that_stops_lives_and_is_not_ready(probed, eventually):
    worker = probed()
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists())
    stopping = threading.Thread(target=worker.shutdown)
    stopping.start()
    eventually(lambda: worker.heartbeat.is_stopping)
    assert ask(worker, "/readyz")[:2] == (503, "The worker is stopping.\n")
    assert ask(worker, "/livez")[0] == 200
    running_tasks.note("go on")
    stopping.join(60)
    assert Task.objects.get().status == "SUCCESSFUL"
    with pytest.raises(ConnectionRefusedError):
        ask(worker, "/livez")


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_hangs_is_named(probed, eventually, monkeypatch, name):
    worker = probed()
    part = getattr(worker, name)
    end = threading.Event()
    monkeypatch.setattr(part, "run_once", lambda: end.wait(FOREVER))
    monkeypatch.setattr(health, "HUNG_AFTER", 0.05)
    part.wake()
    text = rf"The {name} has not responded for \d+ s.\n"
    try:
        eventually(lambda: re.fullmatch(text, ask(worker, "/livez")[1]), why="it was not named")
        assert ask(worker, "/livez")[0] == 503
        assert ask(worker, "/readyz")[0] == 503
    finally:
        monkeypatch.undo()
        end.set()
    eventually(lambda: ask(worker, "/livez")[0] == 200)


@ENDS
@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_has_ended_is_named(probed, eventually, monkeypatch, name):
    worker = probed()
    monkeypatch.setattr(getattr(worker, name), "_run_once_or_back_off", lambda: exec("raise SystemExit"))
    getattr(worker, name).wake()
    eventually(lambda: ask(worker, "/livez")[:2] == (503, f"The {name} has ended.\n"))


def test_a_thread_for_tasks_that_has_ended_is_named(probed, eventually):
    worker = probed()
    worker.in_flight.threads.inbox.put(None)
    eventually(lambda: ask(worker, "/livez")[:2] == (503, "A thread of the executor has ended.\n"))


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
    part = service.ConnectedService("default")
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
    before = metrics(worker)
    monkeypatch.setattr(service, "dedicated_connection", refuse)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name LIKE 'lockworker %%' AND datname = current_database()"
        )
    eventually(lambda: ask(worker, "/readyz")[:2] == (503, "The worker has no connection to the database.\n"))
    assert ask(worker, "/livez")[0] == 200
    monkeypatch.undo()
    eventually(lambda: ask(worker, "/readyz")[0] == 200)
    name = "reconnects_total part=heartbeat"
    assert (before[name], metrics(worker)[name]) == (0, 1)
