"""Running an attempt: its own transaction, and errors outside of the function."""

from __future__ import annotations

import sys
from contextlib import suppress

import psycopg
import pytest
from django.db import OperationalError, connection
from django.db.models.functions import Now

from django_pglock.loggers import RateOfRecords
from django_pglock.models import Attempt as AttemptRow
from django_pglock.models import Task
from django_pglock.store import rescue
from django_pglock.tasks.compat import TaskResultStatus
from django_pglock.worker.child import run
from django_pglock.worker.child.attempt import Attempt
from tests.sample import running_tasks, session_tasks, tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def test_effects_of_an_atomic_task_are_committed_only_with_its_success(worker, finished):
    worker()
    assert finished(tasks.record_atomically.enqueue("once")).status == TaskResultStatus.SUCCESSFUL
    assert finished(tasks.write_and_fail.enqueue("never")).status == TaskResultStatus.FAILED
    assert finished(tasks.record.using(atomic=True).enqueue("by call")).status == TaskResultStatus.SUCCESSFUL
    assert set(Effect.objects.values_list("name", flat=True)) == {"once", "by call"}


def test_a_hook_that_fails_after_the_commit_is_logged_and_the_task_has_succeeded(worker, finished, eventually, caplog):
    """The outcome is committed. Before, the worker logged that another worker has the task."""
    running = worker()
    assert finished(tasks.fail_after_commit.enqueue("kept")).status == TaskResultStatus.SUCCESSFUL
    eventually(lambda: not running.in_flight.claims)
    assert Effect.objects.get().name == "kept"
    [record] = [record for record in caplog.records if "on_commit hook" in record.message]
    assert record.exc_info[0] is ZeroDivisionError
    assert "was lost" not in caplog.text


def test_an_atomic_task_that_lost_its_claim_leaves_no_effect(worker, eventually, gate):
    """The task is rescued while it runs. Its last statement finds that, and all its effects are rolled back."""
    running = worker()
    task = running_tasks.wait_for_note.using(atomic=True).enqueue("go on")
    eventually(lambda: Task.objects.filter(pk=task.id, status="RUNNING").exists())
    assert Task.objects.filter(pk=task.id).update(status="CANCELLED", finished_at=Now()) == 1
    gate()
    eventually(lambda: running.settler.lost == 1, why="the claim was not lost")
    assert not Effect.objects.filter(name="waits").exists()
    assert Task.objects.get(pk=task.id).status == "CANCELLED"


@pytest.fixture(params=["by default", "from a pool", "without autocommit"])
def sessions(request, change_settings):
    """How Django gets its sessions."""
    if request.param == "from a pool":
        change_settings(CONN_MAX_AGE=0, OPTIONS={**connection.settings_dict["OPTIONS"], "pool": True})
    elif request.param == "without autocommit":
        change_settings(AUTOCOMMIT=False)


@pytest.mark.usefixtures("sessions")
def test_an_atomic_task_that_closes_its_session_uses_up_its_attempts(worker, finished):
    """Before, it counted as cut off by an outage and ran without end, with its effects outside of the database."""
    worker(threads=1)
    for number, how in enumerate(["close_as_django_does", "close_psycopgs", "fail_after_close"], 1):
        result = finished(session_tasks.end_session_by.enqueue(how))
        assert result.status == TaskResultStatus.FAILED, how
        row = Task.objects.get(pk=result.id)
        assert (row.attempts, row.retries) == (2, 1), how
        rows = list(AttemptRow.objects.filter(task_id=result.id))
        assert [each.outcome for each in rows] == ["FAILED", "FAILED"], how
        assert all("has closed or replaced its database connection" in each.traceback for each in rows), how
        assert finished(session_tasks.write.enqueue()).status == TaskResultStatus.SUCCESSFUL, how
        assert list(Effect.objects.values_list("name", flat=True)) == ["atomic"] * number, how


@pytest.fixture
def what_is_left():
    yield
    while session_tasks.LEFT:
        with suppress(psycopg.Error):
            session_tasks.LEFT.pop()()


@pytest.mark.usefixtures("what_is_left")
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("replace_session", "has closed or replaced its database connection"),
        ("forget_session", "has closed or replaced its database connection"),
        ("leave_block_open", "has left a block of atomic() open"),
        ("leave_copy_open", "its connection in use"),
        ("leave_copy_open_and_fail", "its connection in use"),
        ("hide_table", "has hidden or removed its row"),
        ("remove_row", "has hidden or removed its row"),
    ],
)
def test_an_atomic_task_that_has_left_its_transaction_uses_up_its_attempts(worker, finished, how, why):
    """Before, it succeeded without its effects, ran without end, or its thread waited for itself forever."""
    worker(threads=1)
    result = finished(session_tasks.end_session_by.enqueue(how))
    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 2)
    assert why in result.errors[-1].traceback
    assert not Effect.objects.exists()
    assert finished(session_tasks.write.enqueue()).status == TaskResultStatus.SUCCESSFUL


@pytest.mark.parametrize(
    "how", ["ask_after_idle", "hide_end_by_idle", "hide_end_on_cursor", "close_after_idle", "transaction_for_too_long"]
)
def test_an_atomic_task_whose_session_the_server_ends_again_and_again_fails(worker, finished, monkeypatch, how):
    """Its transaction exceeds a limit of the role: that is no outage, so it counts as the death of a worker does."""
    if how == "transaction_for_too_long" and connection.pg_version < 170000:
        pytest.skip("the server has no transaction_timeout")
    monkeypatch.setattr(rescue, "FIRST_PAUSE", 0.02)
    worker(threads=1)
    result = finished(session_tasks.end_session_by.enqueue(how))
    assert result.status == TaskResultStatus.FAILED
    row = Task.objects.get(pk=result.id)
    assert (row.retries, row.rescues) == (0, 3)
    *lost, failed = AttemptRow.objects.filter(task_id=result.id).order_by("number")
    assert ({each.outcome for each in lost}, failed.outcome) == ({"LOST"}, "FAILED")
    assert "MAX_RESCUES" in failed.traceback
    assert not Effect.objects.exists()


def test_a_table_that_an_earlier_task_has_hidden_is_not_the_next_ones_failure(worker, finished, monkeypatch):
    monkeypatch.setattr(rescue, "FIRST_PAUSE", 0.02)
    worker(threads=1)
    assert finished(session_tasks.hide_table_for_the_next.enqueue()).status == TaskResultStatus.SUCCESSFUL
    result = finished(session_tasks.write.enqueue())
    assert (result.status, Effect.objects.count()) == (TaskResultStatus.SUCCESSFUL, 1)


@pytest.mark.usefixtures("sessions")
def test_a_function_that_closes_a_lost_session_has_not_failed(worker, finished):
    result = session_tasks.close_after_cut.enqueue()
    worker(threads=1)
    assert finished(result).status == TaskResultStatus.SUCCESSFUL
    assert list(AttemptRow.objects.values_list("outcome", flat=True)) == ["LOST"]
    assert Effect.objects.count() == 1


@pytest.mark.parametrize("task", [tasks.nothing, tasks.sleep_async])
def test_an_error_around_a_function_is_not_its_failure_unless_it_comes_again_and_again(
    worker, finished, eventually, monkeypatch, task
):
    """A thread, or a coroutine, that ended without an outcome would leave the task running, kept by the heartbeat."""
    monkeypatch.setattr(rescue, "FIRST_PAUSE", 0.02)
    running = worker(threads=1)
    with monkeypatch.context() as patch:
        patch.setattr(Attempt, "ended", lambda *args, **kwargs: sys.exit("a mistake of ours"))
        result = finished(task.enqueue(0))
    assert {error.exception_class_path for error in result.errors} == {"builtins.SystemExit"}
    *lost, failed = AttemptRow.objects.order_by("number").values_list("outcome", flat=True)
    # A settle in a session that was opened after the attempt began does not count.
    assert (set(lost), failed, Task.objects.get().rescues) == ({"LOST"}, "FAILED", 3)
    assert "cut off 4 times" in result.errors[-1].traceback
    assert finished(tasks.echo.enqueue("still here")).return_value == "still here"
    eventually(lambda: (running.in_flight.coroutines.running, running.in_flight.claims) == (0, {}))


def test_a_thread_that_cannot_connect_logs_one_warning_and_the_task_runs_later(worker, finished, caplog, monkeypatch):
    """Before, each attempt was logged at DEBUG only, so users did not notice a worker that ran no task."""
    monkeypatch.setattr(run, "cannot_begin", RateOfRecords(3600))
    connect, attempts = run.connection_for, []

    def refused(using):
        attempts.append(using)
        if len(attempts) <= 3:
            raise OperationalError('FATAL:  too many connections for role "app"\n')
        return connect(using)

    monkeypatch.setattr(run, "connection_for", refused)
    worker()
    assert finished(tasks.record_atomically.enqueue("once")).status == TaskResultStatus.SUCCESSFUL
    assert len(attempts) == 4
    [record] = [record for record in caplog.records if "cannot begin" in record.getMessage()]
    assert record.levelname == "WARNING"
    assert "cannot use database 'default', or " in record.getMessage()
    assert 'FATAL: too many connections for role "app". It is given back' in record.getMessage()
