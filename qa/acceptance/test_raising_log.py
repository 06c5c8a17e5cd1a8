"""A log handler raises for each record of a real worker. All tasks end as they would without it."""

from __future__ import annotations

import os
import signal

import pytest

from django_pglock.models import Attempt, Task
from qa.acceptance.test_lost_connections import terminate_all_others
from qa.acceptance.test_supervisor import ready
from tests.conftest import NEVER
from tests.sample import running_tasks, session_tasks, tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]

SETTINGS = "tests.settings_raising_log"
FINISHED = ("SUCCESSFUL", "FAILED", "CANCELLED")


def all_finished():
    return not Task.objects.exclude(status__in=FINISHED).exists()


def test_a_worker_whose_log_raises_runs_tasks_loses_sessions_and_ends_in_order(worker_process, eventually):
    process = worker_process("--threads", "2", "--grace", "1", DJANGO_SETTINGS_MODULE=SETTINGS)
    expected = {
        tasks.echo.enqueue(1).id: ("SUCCESSFUL", 0),
        tasks.sleep_async.enqueue(0).id: ("SUCCESSFUL", 0),
        tasks.fail.enqueue().id: ("FAILED", 0),
        tasks.leave.enqueue().id: ("FAILED", 0),
        tasks.fail_twice.enqueue("a").id: ("SUCCESSFUL", 2),
        tasks.fail_after_commit.enqueue("b").id: ("SUCCESSFUL", 0),
        tasks.leave_in_child.enqueue().id: ("FAILED", 0),
        tasks.break_callback.enqueue().id: ("SUCCESSFUL", 0),
        tasks.raise_unprintable.enqueue().id: ("FAILED", 0),
        session_tasks.leave.enqueue("a BEGIN").id: ("SUCCESSFUL", 0),
        running_tasks.too_long_once.enqueue("sql").id: ("SUCCESSFUL", 1),
        running_tasks.too_long_once.enqueue("python").id: ("SUCCESSFUL", 1),
        # Its backoff raises, so the default backoff is used.
        tasks.fail_with_broken_function.enqueue().id: ("FAILED", 1),
    }
    eventually(all_finished, why=process.output)
    for pk, outcome in expected.items():
        row = Task.objects.get(pk=pk)
        assert (row.status, row.retries) == outcome, row

    terminate_all_others()
    process.wait_for("has lost its database connection")
    later = [tasks.echo.enqueue(2), tasks.sleep_async.enqueue(0)]
    eventually(all_finished, why=process.output)
    assert {Task.objects.get(pk=each.id).status for each in later} == {"SUCCESSFUL"}
    assert process.process.poll() is None

    running_tasks.wait_in_pool.enqueue(running_tasks.FOREVER)
    locked = running_tasks.wait_for_note.enqueue("never")
    eventually(lambda: Effect.objects.filter(name="begun").exists())
    eventually(lambda: Task.objects.get(pk=locked.id).status == "RUNNING")
    process.send(signal.SIGTERM)
    assert process.wait() == 0, process.output
    assert "The grace period is over." in process.output
    assert "no log here" in process.output, "the failure of the log is not printed"
    assert set(Task.objects.exclude(status__in=FINISHED).values_list("status", flat=True)) == {"SCHEDULED"}
    assert not Attempt.objects.filter(outcome="LOST").exists()


def test_a_supervisor_whose_log_raises_replaces_a_process_and_ends_in_order(worker_process, eventually):
    process = worker_process("--processes", "2", "--threads", "1", DJANGO_SETTINGS_MODULE=SETTINGS)
    eventually(lambda: len(ready(process)) == 2, why=process.output)
    victim = min(ready(process))
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: len(ready(process)) == 3, why=process.output)
    terminate_all_others()
    result = tasks.echo.enqueue(1)
    eventually(lambda: Task.objects.get(pk=result.id).status == "SUCCESSFUL", why=process.output)
    process.send(signal.SIGTERM)
    assert process.process.wait(NEVER) == 0, process.output
