"""The worker as users run it: a process, and real signals. The tests check the rows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from django_pglock.models import Attempt, Task, Worker
from django_pglock.store import rescue
from django_pglock.store.bulk import change_tasks, enqueue_redrive
from qa.processes import children_of, sessions
from tests.conftest import NEVER, ROOT, environment_at
from tests.db.store.test_failures import fail
from tests.sample import hostile_tasks, running_tasks, session_tasks, tasks
from tests.sample.hostile_tasks import WAYS
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


def done() -> int:
    return Task.objects.filter(status="SUCCESSFUL").count()


def test_a_signal_is_handled_right_after_a_stop(worker_process):
    """The kernel may deliver the signal to a thread that does not handle it, and wakes no other thread."""
    process = worker_process("--threads", "1")
    process.send(signal.SIGSTOP)
    time.sleep(1.5)  # its other threads have to be due to run, so that they take the signal
    process.send(signal.SIGCONT)
    process.send(signal.SIGTERM)
    assert process.wait() == 0


@pytest.mark.parametrize("arguments", [(), ("--reload",)])
def test_a_task_longer_than_the_grace_period_ends_with_the_process(worker_process, eventually, arguments):
    """Another worker runs the task three seconds later. At exit, Python waits for threads that a task has started."""
    process = worker_process("--grace", "0.5", *arguments)
    running_tasks.wait_in_pool.enqueue(running_tasks.FOREVER)
    eventually(lambda: Effect.objects.exists(), why="the task did not begin")
    process.send(signal.SIGTERM)

    assert process.wait() == 0
    assert "The grace period is over. Giving up" in process.output
    task = Task.objects.get()
    assert (task.status, task.retries, task.rescues) == ("SCHEDULED", 0, 0), "for when the process is gone"


def test_running_tasks_are_cancelled_by_a_notification(worker_process, eventually):
    """The heartbeats are so rare that only the notification can have arrived."""
    worker_process("--threads", "3", DJANGO_SETTINGS_MODULE="tests.settings_slow_beats")
    functions = [running_tasks.run_sql, running_tasks.ask, running_tasks.wait_in_coroutine]
    for function in functions:
        function.enqueue()
    eventually(lambda: Effect.objects.count() == len(functions), why="not every task began")
    time.sleep(0.1)  # the note is written right before the function begins to wait
    assert Task.objects.cancel() == len(functions)
    eventually(lambda: Task.objects.filter(status="CANCELLED").count() == len(functions), why="not all were cancelled")


@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_terminal_shows_the_banner_and_each_failure_once(worker_process, debug):
    """In development also each success. The log of django.tasks would repeat both in another format."""
    tasks.echo.enqueue(5)
    failed = tasks.fail.enqueue("no luck")
    process = worker_process("--no-reload", DEBUG=debug)
    process.wait_for(f"Task {failed.id} (tests.sample.tasks.fail) attempt 1 of 1 failed after")
    process.send(signal.SIGTERM)
    assert process.wait() == 0
    assert process.output.count("Traceback") == 1, process.output
    assert process.output.count("no luck") == 2, "in the line, and below its traceback"
    assert ("tests.sample.tasks.echo) attempt 1 of 1 succeeded" in process.output) is (debug == "1")
    assert (
        process.output.index(" of django_pglock ") < process.output.index("  look  ") < process.output.index("is ready")
    )
    assert "state=" not in process.output


# How many sessions a worker has: while it is idle, and a while after it has worked.


def kinds() -> Counter[str]:
    """Return how many sessions there are of each kind. Those of task threads have no name."""
    return Counter(name for name, _ in sessions() if name != "lockworker upkeep")


def idle(processes: int) -> Counter[str]:
    """Return the sessions of a worker with so many idle children: one for each, and the session of the heartbeat."""
    return Counter({"lockworker heartbeat": 1, "lockworker feeder": processes})


@pytest.mark.parametrize("processes", [1, 3])
def test_an_idle_child_has_one_session_and_shares_one(worker_process, eventually, processes):
    process = worker_process("--processes", str(processes), "--threads", "2")
    eventually(lambda: process.output.count("is ready") == processes, why=process.output)
    eventually(lambda: kinds() == idle(processes), why=f"it has {kinds()}")
    tasks.record.enqueue("used")
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists(), why=process.output)
    # The sessions of the task's thread and of the settler are closed after a minute.
    used = idle(processes) + Counter({"": 1, "lockworker settler": 1})
    assert kinds() <= used
    assert "lost its database connection" not in process.output


# Whatever a task does to its process, the worker continues, other tasks run, and SIGTERM ends the worker in order.


@pytest.mark.parametrize("function", [hostile_tasks.do, hostile_tasks.do_in_coroutine], ids=["sync", "async"])
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_survives_what_a_task_does_to_its_process(worker_process, eventually, way, function):
    process = worker_process("--threads", "2", "--grace", "1")
    hostile = function.enqueue(way)
    eventually(lambda: Effect.objects.filter(name=way).exists(), why=process.output)
    if way.startswith(("close_all", "redirect_all")):
        # It hears nothing more. Functions that run beside this one lose their files, too, at each of its attempts.
        process.wait_for("has ended unexpectedly")
    if way.startswith(("close_all", "redirect_all", "exhaust_memory")):
        # Otherwise functions beside its next attempt would lose their files, too, or meet the same limit.
        eventually(lambda: Task.objects.filter(pk=hostile.id, finished_at__isnull=False).exists(), why=process.output)
    for number in range(6):
        (tasks.record_atomically if number % 2 else tasks.record).enqueue("beside", number)
        tasks.sleep_async.enqueue(0.01)
    beside = Task.objects.exclude(pk=hostile.id)
    eventually(lambda: not beside.exclude(status="SUCCESSFUL").exists(), why=process.output)
    eventually(lambda: Task.objects.filter(pk=hostile.id, finished_at__isnull=False).exists(), why=process.output)
    assert sorted(Effect.objects.filter(name="beside", number__in=(1, 3, 5)).values_list("number", flat=True)) == [
        1, 3, 5,
    ]  # fmt: skip
    process.send(signal.SIGTERM)
    assert process.wait() == 0, process.output
    assert not Worker.objects.exists()


# Connections to the database are lost and opened again; the worker continues.


def test_a_task_that_ends_its_own_session_again_and_again_ends_failed(worker, eventually, monkeypatch):
    """Before, it ran forever. The other sessions of the worker live, so there is no outage."""
    monkeypatch.setattr(rescue, "FIRST_PAUSE", 0.02)
    worker(threads=2)
    session_tasks.end_own_session.enqueue(99)
    row = eventually(lambda: Task.objects.filter(finished_at__isnull=False).first())
    assert (row.status, row.retries, row.rescues) == ("FAILED", 0, 3)
    assert 4 <= row.attempts <= 10
    *lost, last = Attempt.objects.order_by("number")
    assert ({each.outcome for each in lost}, last.outcome) == ({"LOST"}, "FAILED")
    assert "MAX_RESCUES" in last.traceback
    assert not Effect.objects.exists()


# A redrive outlives the worker that runs it.


def test_a_redrive_whose_worker_is_killed_half_way_continues_elsewhere(worker_process, eventually):
    """No task is forgotten, and none is counted twice: the count is committed together with the retries."""
    for _ in range(20):
        fail(fingerprint=7, queue="elsewhere")
    victim = worker_process("--threads", "1", "default")
    made, _ = enqueue_redrive("default", 7, 5)
    eventually(lambda: Task.objects.filter(pk=made, progress__done__gt=0).exists(), why="it did not begin")
    victim.send(signal.SIGKILL)
    worker_process("--threads", "1", "default")
    ended = eventually(lambda: Task.objects.filter(pk=made, status="SUCCESSFUL").first(), why="it did not go on")
    assert (ended.result, ended.progress["done"], ended.progress["total"]) == (20, 20, 20)
    assert Task.objects.filter(queue="elsewhere", status="READY").count() == 20


def test_a_worker_knows_the_function_of_a_redrive_from_its_start(worker_process, eventually):
    """A busy worker checks only every half minute for functions that it does not know."""
    worker_process("default")
    [known] = eventually(lambda: list(Worker.objects.values_list("task_paths", flat=True)), why="it did not start")
    assert change_tasks.module_path in known


# The worker as process 1 of a container: it gets the signals, and reaps what tasks leave.


#: Only root may make a container without a mapping of users, and only without one may root use the socket of another.
MAPPING = ["--user", "--map-root-user"] if os.geteuid() else []


CONTAINER = ["unshare", *MAPPING, "--pid", "--fork", "--mount-proc"]


COMMAND = [sys.executable, str(ROOT / "manage.py"), "runlockworker", "--threads", "2"]


def sleeps_of(pid: int) -> list[int]:
    """Return the programs that a task has started, also those that have ended and are not reaped."""
    return [child for child in children_of(pid) if "(sleep)" in Path(f"/proc/{child}/stat").read_text()]


@pytest.fixture
def first_process(transactional_db, eventually):
    """Start a worker as process 1, and return its process here and its number outside of the container."""
    with subprocess.Popen([*CONTAINER, *COMMAND], env=environment_at(), stderr=subprocess.PIPE, text=True) as process:
        try:
            eventually(lambda: Worker.objects.exists() or process.poll() is not None)
            assert process.poll() is None, process.stderr.read()
            yield process, children_of(process.pid)[0]
        finally:
            process.kill()


def test_the_first_process_reaps_what_tasks_leave_and_ends_in_order(first_process, eventually):
    process, first = first_process
    hostile_tasks.leave_orphans.enqueue(2)
    eventually(lambda: len(sleeps_of(first)) == 2, why="they are no orphans, so this shows nothing")
    eventually(lambda: not sleeps_of(first), why="they are not reaped")
    tasks.note_and_sleep.enqueue("finishes", 1)
    eventually(lambda: Effect.objects.filter(name="finishes").exists())
    os.kill(first, signal.SIGTERM)
    process.communicate(timeout=NEVER)
    assert process.returncode == 0
    assert set(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}
    assert not Worker.objects.exists()
