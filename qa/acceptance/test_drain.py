"""A worker with ``--drain`` also runs tasks of dead workers, and reports the tasks that it cannot run."""

from __future__ import annotations

import signal
import time
from uuid import uuid4

import pytest
from django.db.models.functions import Now

from django_pglock.models import Task, Worker
from django_pglock.worker.child.child import LEFT_BEHIND
from django_pglock.worker.child.claimer import Claimer
from django_pglock.worker.child.feeder import Drain
from django_pglock.worker.child.in_flight import InFlight
from django_pglock.worker.queues import Queues
from tests.conftest import NEVER, WorkerProcess, database_url
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


@pytest.fixture
def drain():
    """Run a worker with ``--drain`` and return its exit code and what it has said."""

    def run(*arguments):
        process = WorkerProcess("--drain", *arguments)
        try:
            return process.wait(), process.output
        finally:
            process.end()

    return run


def make_unknown(count, queue="default"):
    for _ in range(count):
        tasks.nothing.using(queue_name=queue).enqueue()
    Task.objects.filter(queue=queue, task_path__endswith="nothing").update(task_path="shop.gone")


@pytest.mark.parametrize("options", [(), ("--processes", "2")])
def test_a_draining_worker_runs_the_tasks_of_a_killed_worker(worker_process, drain, eventually, options):
    """As from cron: no other worker is there to rescue the task."""
    victim = worker_process("--threads", "1")
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists(), why="the task did not begin")
    victim.send(signal.SIGKILL)
    victim.wait()
    Effect.objects.create(name="go on")

    code, output = drain(*options)
    assert Task.objects.get().status == "SUCCESSFUL", output
    assert code == 0


def test_a_draining_worker_does_not_wait_for_running_tasks_of_other_workers(worker_process, drain, eventually):
    worker_process("--threads", "1")
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists(), why="the task did not begin")
    code, output = drain()
    assert code == 0, output
    assert Task.objects.get().status == "RUNNING"


@pytest.mark.parametrize("options", [(), ("--processes", "2")])
def test_a_draining_worker_reports_the_tasks_that_it_does_not_run(drain, options):
    make_unknown(2)
    tasks.record.enqueue("known")
    code, output = drain(*options)
    assert code == LEFT_BEHIND, output
    assert "It leaves 2 tasks of queue 'default' that call 'shop.gone', which this worker does not know." in output
    assert Effect.objects.exists()


def test_a_draining_worker_waits_for_a_rescue_only_for_a_limited_time(settings):
    """If no round of upkeep succeeds, the row may stay forever."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 0.05}
    tasks.nothing.enqueue()
    Task.objects.update(status="RUNNING", worker=uuid4(), attempts=1, started_at=Now(), last_attempted_at=Now())
    assert not Worker.objects.exists()
    ended = []
    drain = Drain(Claimer("default", uuid4(), Queues()), end=lambda: ended.append(1))
    began = time.monotonic()
    while not drain.is_last_poll(InFlight(1)):
        assert time.monotonic() - began < NEVER
    drain.finish()
    assert ended == [1]
    assert drain.left_behind == ["1 task of queue 'default' that runs on a worker that may be dead"]


@pytest.mark.parametrize("options", [(), ("--processes", "2")])
def test_a_draining_worker_ends_if_its_database_does_not_exist(options):
    process = WorkerProcess("--drain", *options, url=database_url("nowhere"))
    try:
        code = process.wait()
    finally:
        process.end()
    assert code == LEFT_BEHIND, process.output
    text = "could not use the database 'default' within 5 s: "
    assert text in process.output
    assert 'database "nowhere" does not exist' in process.output.partition(text)[2]
