"""The heartbeat process beats for a worker whose threads cannot, and for no other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from django_pglock.models import Task, Worker
from django_pglock.store.rescue import rescue
from django_pglock.worker.liveness import heartbeat_process, heartbeat_process_main
from tests.conftest import NEVER, heartbeat_processes_of
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]

#: Seconds: HEARTBEAT_LIMIT of the tests, a round of rescue, and some.
LONGER_THAN_THE_LIMIT = 6.0


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


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


def sessions_of_helpers():
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lockworker heartbeat process'")
        return cursor.fetchone()[0]


FORKS = """
import os, socket, time
from django_pglock.worker.liveness import heartbeat_process
mine, its_end = socket.socketpair()
helper = heartbeat_process.start(its_end)
its_end.close()
mine.send(heartbeat_process.line_of({"interval": 0.2, "limit": 1.0}) + b"\\n")
child = os.fork()
if child:
    print(helper.pid, child, flush=True)
time.sleep(60)
"""


def test_the_heartbeat_process_ends_while_a_forked_child_keeps_its_socket_open(eventually):
    parent = subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, text=True)
    helper, child = map(int, parent.stdout.readline().split())
    try:
        parent.kill()
        parent.wait()
        eventually(lambda: not is_there(helper), why="the heartbeat process outlives its worker")
        assert is_there(child)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


class Charge:
    """A heartbeat process of this very process, and what a worker would send to it."""

    def __init__(self, **instructions):
        self.socket, its_end = socket.socketpair()
        with its_end:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(heartbeat_process.SCRIPT)],
                stdin=its_end,
                stderr=subprocess.PIPE,
                text=True,
            )
        self.instruct(**instructions)

    def instruct(self, **instructions):
        self.socket.send(heartbeat_process.line_of(instructions))

    def say(self):
        self.socket.send(b"\n")

    def end(self):
        self.socket.close()
        self.process.wait(NEVER)
        self.process.stderr.close()


@pytest.fixture
def charge(worker):
    """Start a heartbeat process for the row of a worker that does not exist, so no other process beats for it."""
    started = []

    def start(interval=0.1):
        running = worker()
        instructions = {**running.heartbeat.process._newest, "interval": interval}
        row = Worker.objects.get()
        running.shutdown()
        row.save(force_insert=True)
        started.append(Charge(**instructions))
        return started[-1], row

    yield start
    for each in started:
        each.end()


def beat(row):
    return Worker.objects.get(pk=row.pk).heartbeat_at


def test_the_heartbeat_process_beats_from_a_late_beat_until_a_punctual_one(charge, eventually):
    helper, row = charge(interval=0.5)
    eventually(lambda: beat(row) > row.heartbeat_at, why="it did not speak")
    eventually(lambda: sessions_of_helpers() == 1)
    eventually(lambda: helper.say() or sessions_of_helpers() == 0, why="it did not fall silent")

    def is_silent():
        """Wait longer than an interval, but not until a beat is late. If this test was late, the process may beat."""
        helper.say()
        before = beat(row)
        time.sleep(0.6)
        return beat(row) == before

    eventually(is_silent, why="it spoke although the beats were in time")
    silent = beat(row)
    eventually(lambda: beat(row) > silent, why="it did not speak again")


def test_a_beat_of_the_heartbeat_process_restarts_the_continuous_beats_of_the_worker(charge, eventually):
    """After an outage this process may connect before all others. Its heartbeat must not count as uninterrupted."""
    _helper, row = charge()
    eventually(lambda: beat(row) > row.heartbeat_at, why="it did not speak")
    after = Worker.objects.get(pk=row.pk)
    assert row.heartbeat_at < after.heartbeat_at <= after.beating_since


def test_the_heartbeat_process_does_not_recreate_a_deleted_worker_row(charge, eventually):
    _helper, row = charge()
    eventually(lambda: beat(row) > row.heartbeat_at)
    row.delete()
    eventually(lambda: sessions_of_helpers() == 1)
    time.sleep(0.5)
    assert not Worker.objects.exists()


def test_the_heartbeat_process_logs_once_that_it_cannot_connect_and_continues(charge, eventually):
    helper, _row = charge()
    helper.instruct(interval=0.05, connection={"host": "/nowhere"})
    assert "cannot reach the database" in helper.process.stderr.readline()
    time.sleep(0.5)
    assert helper.process.poll() is None
    helper.socket.close()
    assert helper.process.wait(NEVER) == 0
    assert helper.process.stderr.read() == ""


def test_the_heartbeat_process_stops_beating_after_a_time_limit(monkeypatch):
    """If a process could not run for an hour, its state will not end by itself."""
    substitute, written = heartbeat_process_main.SubstituteHeartbeat(), []
    monkeypatch.setattr(substitute, "_write", written.append)
    substitute.beat()
    substitute._since -= heartbeat_process_main.LONGEST + 1
    substitute.beat()
    assert len(written) == 1
    substitute.pause()
    substitute.beat()
    assert len(written) == 2


def test_stopped_processes_and_zombies_do_not_count_as_running(eventually):
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert heartbeat_process_main.is_running(process.pid)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: not heartbeat_process_main.is_running(process.pid), why="it is stopped")
        process.send_signal(signal.SIGCONT)
        eventually(lambda: heartbeat_process_main.is_running(process.pid))
        process.kill()
        eventually(lambda: not heartbeat_process_main.is_running(process.pid), why="it is a zombie")
    finally:
        process.kill()
        process.wait()
    assert not heartbeat_process_main.is_running(process.pid)


def test_a_worker_without_heartbeat_process_logs_a_warning_once_and_works(worker, monkeypatch, caplog, eventually):
    monkeypatch.setattr(heartbeat_process.sys, "executable", "/nowhere/python")
    monkeypatch.setattr(heartbeat_process, "FIRST_PAUSE", 0.01)
    running = worker()
    attempts = []
    monkeypatch.setattr(running.heartbeat.process, "_start_when_due", lambda: attempts.append(1) or 1 / 0)
    tasks.record.enqueue("works")
    eventually(lambda: Effect.objects.exists())
    eventually(lambda: len(attempts) >= 2, why="it was not tried again")
    assert sum("has lost its heartbeat process" in message for message in caplog.messages) == 1
