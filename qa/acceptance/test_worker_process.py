"""The worker as users run it: a process, and real signals. The tests check the rows."""

from __future__ import annotations

import signal
import time
from collections import Counter

import pytest
from django.db import transaction

from django_pglock.models import Task, Worker
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


def done() -> int:
    return Task.objects.filter(status="SUCCESSFUL").count()


def test_kill_9_under_load_loses_nothing(worker_process, eventually):
    """Three workers share 300 tasks, a third of them atomic; one is killed in the middle.

    Every task ends successful and leaves its effect; an atomic one leaves it exactly once, whichever process died.
    """
    victim, *_others = [worker_process("--threads", "2") for _ in range(3)]
    with transaction.atomic():
        for number in range(100):
            tasks.record.enqueue("often", number)
            tasks.record_atomically.enqueue("once", number)
            tasks.nothing.enqueue()

    eventually(lambda: done() > 50, why="the work did not begin")
    victim.send(signal.SIGKILL)
    eventually(lambda: done() == 300, why="some task was lost")

    often = Counter(Effect.objects.filter(name="often").values_list("number", flat=True))
    once = Counter(Effect.objects.filter(name="once").values_list("number", flat=True))
    assert set(often) == set(range(100))
    assert once == Counter(range(100)), "an atomic task had its effect not exactly once"
    assert victim.wait() == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_running_tasks_finish(worker_process, eventually, number):
    """Also SIGHUP, which comes when a terminal is closed, and often twice: from the shell and from the kernel."""
    process = worker_process("--threads", "1", "--grace", "600")
    running_tasks.wait_for_note.enqueue("go on")
    tasks.record.enqueue("stays")
    eventually(lambda: Effect.objects.exists())
    process.send(number)
    process.wait_for("Waiting up to")
    process.send(signal.SIGHUP)
    Effect.objects.create(name="go on")

    assert process.wait() == 0
    assert done() == 1
    assert Task.objects.filter(status="READY").count() == 1
    assert not Worker.objects.exists()


def test_a_signal_is_handled_right_after_a_stop(worker_process):
    """The kernel may deliver the signal to a thread that does not handle it, and wakes no other thread."""
    process = worker_process("--threads", "1")
    process.send(signal.SIGSTOP)
    time.sleep(1.5)  # its other threads have to be due to run, so that they take the signal
    process.send(signal.SIGCONT)
    process.send(signal.SIGTERM)
    assert process.wait() == 0


def test_the_second_signal_to_a_worker_gives_its_running_task_back(worker_process, eventually):
    process = worker_process("--threads", "1", "--grace", "600")
    tasks.note_and_sleep.enqueue("is cut short", running_tasks.FOREVER)
    eventually(lambda: Effect.objects.exists())
    process.send(signal.SIGTERM)
    process.wait_for("Waiting up to")
    process.send(signal.SIGTERM)

    assert process.wait() == 0
    task = Task.objects.get()
    assert (task.status, task.retries, task.rescues) == ("SCHEDULED", 0, 0), "for when the process is gone"


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


def test_successive_deploys_leave_no_task_running(worker, eventually):
    """A peer leaves a task running forever when the signal comes between its claim and its start."""
    for round_ in range(6):
        for number in range(10):
            tasks.record.enqueue("deploy", round_ * 10 + number)
        running = worker(threads=2)
        if round_ % 2:
            time.sleep(0.01 * (round_ // 2))
        running.stop()
        assert running.shutdown() is True
        assert not Task.objects.filter(status="RUNNING").exists()
    worker(threads=2)
    eventually(lambda: done() == 60)
    assert Counter(Effect.objects.values_list("number", flat=True)) == Counter(range(60))


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
