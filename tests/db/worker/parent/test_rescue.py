"""What a parent does with the tasks of a child that has died: rescue at once, and overrun attempts end by timeout."""

from __future__ import annotations

import logging
from uuid import uuid4

import pytest
from django.db import OperationalError

from django_pglock import conf
from django_pglock.models import Attempt, Task, Worker
from django_pglock.worker.parent import upkeep as module
from tests.db.store.workers import beat
from tests.db.worker.conftest import make_upkeep, statuses
from tests.sample import running_tasks, tasks

pytestmark = pytest.mark.django_db(transaction=True)

TIMEOUT = "django_pglock.errors.TaskTimeout"


@pytest.fixture
def upkeep():
    """An upkeep that is its own witness for no time, so it rescues nothing from workers that have rows."""
    made = make_upkeep()
    made.start()
    yield made
    made.stop()
    assert made.wait(60)


def registered():
    """Return the id of a worker with a row and a recent heartbeat."""
    worker = uuid4()
    beat("default", worker, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False, task_paths=[])
    return worker


@pytest.fixture
def dead():
    """A worker with a row and a recent heartbeat, whose process has ended."""
    return registered()


def test_the_tasks_of_a_child_that_has_ended_are_rescued_at_once(upkeep, dead, claim, eventually, caplog):
    """Its last heartbeat is a moment old."""
    tasks.nothing.enqueue()
    claim(worker=dead)
    upkeep.end_worker(dead, [])
    eventually(lambda: statuses() == {"READY": 1})
    row = Task.objects.get()
    assert (row.attempts, row.retries, row.rescues) == (1, 0, 1)
    assert not Worker.objects.exists()
    assert f"was taken back from worker {dead}, which is dead; it is READY now." in caplog.text


def test_a_rescue_is_not_forgotten_while_the_database_is_away(upkeep, dead, claim, eventually, monkeypatch):
    tasks.nothing.enqueue()
    claim(worker=dead)
    failures, deregister = iter([True] * 3), module.deregister

    def fail_first(using, worker):
        if next(failures, False):
            raise OperationalError("no server")
        deregister(using, worker)

    monkeypatch.setattr(module, "deregister", fail_first)
    upkeep.end_worker(dead, [])
    eventually(lambda: statuses() == {"READY": 1})


def test_a_parent_that_ends_rescues_before(upkeep, dead, claim):
    tasks.nothing.enqueue()
    claim(worker=dead)
    upkeep.end_worker(dead, [])
    upkeep.stop()
    assert upkeep.wait(60)
    assert statuses() == {"READY": 1}


def test_an_overrun_attempt_fails_by_its_timeout_and_its_neighbour_loses_none(upkeep, dead, claim, eventually, caplog):
    """The child was killed because the function kept its process from running."""
    overrun = running_tasks.keep_gil.enqueue(600)
    neighbour = tasks.nothing.enqueue()
    first, _ = claim(2, worker=dead)
    with caplog.at_level(logging.INFO, logger="django_pglock"):
        upkeep.end_worker(dead, [(first.id, first.attempt), (first.id, 7)])
        eventually(lambda: statuses() == {"FAILED": 1, "READY": 1})
    assert Task.objects.get(status="FAILED").pk == int(overrun.id)
    attempt = Attempt.objects.get(exception_path=TIMEOUT)
    assert (attempt.task_id, attempt.number) == (int(overrun.id), 1)
    row = Task.objects.get(pk=neighbour.id)
    assert (row.retries, row.rescues) == (0, 1)
    assert TIMEOUT.rpartition(".")[2] in caplog.text


def test_the_policy_of_its_function_retries_an_overrun_attempt(upkeep, dead, claim, eventually):
    running_tasks.run_sql.enqueue()
    [claimed] = claim(worker=dead)
    upkeep.end_worker(dead, [(claimed.id, claimed.attempt)])
    eventually(lambda: Attempt.objects.filter(exception_path=TIMEOUT).exists())
    row = Task.objects.get()
    assert row.status in ("SCHEDULED", "READY")
    assert (row.retries, row.rescues) == (1, 0)


def test_an_overrun_attempt_frees_its_key(upkeep, dead, claim, eventually):
    first = running_tasks.locked.enqueue("a")
    running_tasks.locked.enqueue("a")
    [claimed] = claim(worker=dead)
    claim(worker=uuid4())
    assert claimed.id == int(first.id)
    upkeep.end_worker(dead, [(claimed.id, claimed.attempt)])
    eventually(lambda: statuses() == {"FAILED": 1, "READY": 1}, why=f"{statuses()}")


def test_an_attempt_that_was_settled_before_its_child_died_stays_so(upkeep, dead, claim, eventually):
    """The message that it had ended did not come any more."""
    tasks.nothing.enqueue()
    [claimed] = claim(worker=dead)
    other = registered()
    Task.objects.update(worker=other, attempts=2)
    upkeep.end_worker(dead, [(claimed.id, 1)])
    eventually(lambda: list(Worker.objects.values_list("pk", flat=True)) == [other])
    assert statuses() == {"RUNNING": 1}
    assert not Attempt.objects.exists()


def test_a_claim_that_the_server_commits_after_the_death_of_its_child_is_taken_back_soon(
    upkeep, dead, claim, eventually, settings, monkeypatch
):
    """An idle parent does its next round much later."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 0.1}
    monkeypatch.setattr(conf, "BEATS_TO_THE_LIMIT", 40_000)
    monkeypatch.setattr(module, "STANDBY_FACTOR", 40_000)
    upkeep.heartbeat.is_quiet = True
    upkeep.end_worker(dead, [])
    eventually(lambda: upkeep._rescued_at > 0.0, why="its tasks are not rescued")
    tasks.nothing.enqueue()
    claim(worker=dead)
    eventually(lambda: statuses() == {"READY": 1})
