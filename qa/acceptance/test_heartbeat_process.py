"""The heartbeat process beats for a worker whose threads cannot, and for no other."""

from __future__ import annotations

import os
import signal

import pytest

from django_pglock.models import Task, Worker
from django_pglock.store.rescue import rescue
from qa.acceptance.heartbeat_processes import is_there, sessions_of_helpers
from tests.conftest import heartbeat_processes_of
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]

#: Seconds: HEARTBEAT_LIMIT of the tests, a round of rescue, and some.
LONGER_THAN_THE_LIMIT = 7.0


@pytest.fixture
def helper_of(eventually):
    def find(process):
        return eventually(
            lambda: heartbeat_processes_of(process.process.pid), why="the worker has no heartbeat process"
        )[0]

    return find


def test_a_task_that_keeps_the_gil_runs_once(worker_process, eventually):
    """For longer than the limit after which a worker counts as dead in any case, with another one ready to rescue."""
    busy = worker_process("--threads", "1")
    running_tasks.keep_gil.enqueue(LONGER_THAN_THE_LIMIT)
    eventually(lambda: Effect.objects.exists(), why="the task did not begin")
    worker_process("--threads", "1")

    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists(), why=busy.output)
    task = Task.objects.get()
    assert (task.attempts, task.rescues, task.result) == (1, 0, "once")
    assert Effect.objects.get().pid == busy.process.pid
    assert (task.finished_at - task.started_at).total_seconds() > LONGER_THAN_THE_LIMIT - 1


def test_a_stopped_worker_is_rescued_although_its_heartbeat_process_lives(worker_process, helper_of, eventually):
    stopped = worker_process("--threads", "1")
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists())
    helper = helper_of(stopped)
    stopped.send(signal.SIGSTOP)
    worker_process("--threads", "1")

    eventually(lambda: Effect.objects.count() == 2, why="it was not rescued")
    Effect.objects.create(name="go on")
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists())
    assert is_there(helper)
    assert Task.objects.get().rescues == 1


def test_the_heartbeat_process_reports_at_once_that_its_worker_has_died(worker_process, helper_of, eventually):
    """Heartbeats are so rare that no other worker notices the death. The process keeps no pipe of its worker open."""
    victim = worker_process("--threads", "1", DJANGO_SETTINGS_MODULE="tests.settings_slow_beats")
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists(), why="the task did not begin")
    helper = helper_of(victim)
    victim.send(signal.SIGKILL)

    eventually(lambda: not Worker.objects.exists(), why="the row of the dead worker is still there")
    [rescued] = rescue("default")
    assert rescued.status == "READY"
    eventually(lambda: not is_there(helper), why="the heartbeat process outlives its worker")


def test_the_heartbeat_process_ends_with_its_worker_whatever_ends_that(worker_process, helper_of, eventually):
    killed, asked = worker_process(), worker_process()
    helpers = [helper_of(killed), helper_of(asked)]
    for helper in helpers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(helper, number)  # the signal that a terminal or a service manager sends to all processes
    killed.send(signal.SIGKILL)
    killed.wait()
    eventually(lambda: not is_there(helpers[0]))
    assert is_there(helpers[1]), "it ended while its worker lives"
    asked.send(signal.SIGTERM)
    assert asked.wait() == 0
    eventually(lambda: not is_there(helpers[1]))


def test_a_heartbeat_process_that_is_killed_is_replaced(worker_process, helper_of, eventually):
    process = worker_process()
    first = helper_of(process)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: heartbeat_processes_of(process.process.pid) not in ([], [first]), why="there is no new one")
    process.wait_for("The worker has lost its heartbeat process")
    tasks.record.enqueue("works")
    eventually(lambda: Effect.objects.exists())


def test_the_heartbeat_process_has_no_connection_while_the_worker_beats_itself(worker_process, helper_of, eventually):
    process = worker_process()
    helper_of(process)
    first = Worker.objects.get().heartbeat_at
    eventually(lambda: Worker.objects.get().heartbeat_at > first)
    # On a slow machine a heartbeat may be late. Then this process has sent heartbeats for a short time.
    eventually(lambda: sessions_of_helpers() == 0)
