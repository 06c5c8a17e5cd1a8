"""Timeouts in real processes: functions that swallow their stop, that do not leave, and services that hang."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from django_pglock.models import Attempt, Task, Worker
from tests.conftest import NEVER, ROOT, environment_at
from tests.sample import running_tasks as running
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]

TIMEOUT = "django_pglock.errors.TaskTimeout"


def ended(results) -> bool:
    return not Task.objects.filter(pk__in=[each.id for each in results], finished_at=None).exists()


def failed_by_timeout(results) -> bool:
    found = Attempt.objects.filter(task__in=[each.id for each in results]).values_list("exception_path", flat=True)
    rows = Task.objects.filter(pk__in=[each.id for each in results])
    return [*found] == [TIMEOUT] * len(results) and {row.status for row in rows} == {"FAILED"}


def test_timeouts_in_the_middle_of_logging_leave_the_log_usable(worker_process, eventually):
    """Before, an exception was sent into the thread. Between two lines of ``logging``, its lock stayed locked forever,
    and everything in the process waited for it, under a fresh heartbeat."""
    process = worker_process("--threads", "3")
    results = [running.log_for.enqueue(0.6) for _ in range(15)]
    eventually(lambda: ended(results), why=process.output)
    assert failed_by_timeout(results)
    assert tasks.echo.enqueue("alive").wait(60).status == "SUCCESSFUL"
    process.send(signal.SIGTERM)
    assert process.wait() == 0


def test_a_function_in_c_that_keeps_the_gil_fails_by_its_timeout(worker_process, eventually):
    process = worker_process("--threads", "2", "--grace", "600")
    result = running.keep_gil.using(timeout=0.3).enqueue(1.5)
    eventually(lambda: ended([result]), why=process.output)
    assert failed_by_timeout([result])
    assert tasks.echo.enqueue("alive").wait(60).status == "SUCCESSFUL"


@pytest.mark.parametrize("function", [running.overrun, running.overrun_in_coroutine])
def test_a_worker_alone_ends_in_order_for_functions_that_do_not_leave(worker_process, eventually, function):
    """Two at once. A third task finishes, those that wait are given back, and the exit code calls a service manager."""
    process = worker_process("--threads", "3", "--grace", "5")
    neighbour = running.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.filter(name="waits").exists())
    results = [function.enqueue()]
    if function is running.overrun:
        results.append(function.enqueue())
    process.wait_for("The worker ends, with exit code 1")
    waiting = tasks.echo.enqueue("waits for the next worker")
    Effect.objects.create(name="go on")

    assert process.wait() == 1, process.output
    assert failed_by_timeout(results)
    assert list(Task.objects.filter(pk=neighbour.id).values_list("status", "attempts")) == [("SUCCESSFUL", 1)]
    assert Task.objects.get(pk=waiting.id).status == "READY"
    for result in results:
        assert f"Task {result.id} ({function.module_path}) attempt 1 of 1 does not end" in process.output
    assert "Let the function call context.check()" in process.output
    assert not Worker.objects.exists()


def test_a_reloading_worker_starts_again_after_a_function_that_does_not_leave(worker_process, eventually):
    process = worker_process("--reload", "--grace", "1", "--threads", "2")
    result = running.overrun.enqueue()
    eventually(lambda: process.output.count("is ready") == 2, why=process.output)
    assert failed_by_timeout([result])
    assert tasks.echo.enqueue("alive").wait(60).status == "SUCCESSFUL"
    process.send(signal.SIGTERM)
    assert process.wait() == 0


#: A worker that gives a hanging thread one second instead of a minute.
HANGING = """
import django
from django.core.management import call_command

django.setup()
from django_pglock.management import worker_process

worker_process.LAST_RESORT = 1.0
call_command("runlockworker", reload=False, grace=0.5, threads=2)
"""


@pytest.mark.parametrize("is_told", [False, True])
def test_a_worker_whose_services_hang_in_the_log_ends(eventually, is_told):
    """By itself, and at SIGTERM."""
    slow = {"DJANGO_SETTINGS_MODULE": "tests.settings_slow_beats"} if is_told else {}
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING], cwd=ROOT, env=environment_at(**slow), stderr=subprocess.PIPE, text=True
    )
    try:
        eventually(lambda: Worker.objects.exists(), why="it did not start")
        running.block_log.enqueue()
        if is_told:
            eventually(lambda: Effect.objects.exists())
            process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=NEVER)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    assert "one of its threads hangs" in said
