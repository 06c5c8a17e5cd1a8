"""Connections to the database are lost and opened again; the worker continues."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock.models import Attempt, Task, Worker
from django_pglock.store import rescue
from tests.sample import session_tasks, tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


OTHERS = """FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()
            AND backend_type = 'client backend'"""


#: The session of an atomic task that has written to its table.
IN_TASK = "AND backend_xid IS NOT NULL AND position('sample_effect' IN query) > 0"


def count_others(condition: str = "") -> int:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) {OTHERS} {condition}")
        return cursor.fetchone()[0]


def terminate_all_others() -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT pg_terminate_backend(pid) {OTHERS}")


def test_every_connection_of_a_worker_may_be_terminated(worker_process, eventually):
    """The sessions of the heartbeat, of fetcher, settler and upkeep, and of the threads. New ones are opened."""
    process = worker_process("--threads", "2")
    for round_ in range(3):
        for number in range(20):
            tasks.record_atomically.enqueue("kept", round_ * 20 + number)
        eventually(lambda: Effect.objects.exists())
        eventually(lambda: count_others() >= 2, why="its sessions are not back")
        terminate_all_others()
    eventually(lambda: not Task.objects.exclude(status="SUCCESSFUL").exists(), why=process.output)
    assert sorted(Effect.objects.values_list("number", flat=True)) == list(range(60))
    assert process.process.poll() is None
    assert Worker.objects.count() == 1, "it is still the same worker"


def test_a_storm_of_cut_connections_is_no_poison_pill(worker_process, eventually):
    """There are more cuts than MAX_RESCUES, and the task has one attempt. An outage does not count against a task.

    The other sessions of the worker are cut at the same moment. So the worker knows that the task is not the cause.
    """
    worker_process("--threads", "1")
    session_tasks.write_and_wait_for_note.enqueue()
    for number in range(1, 6):
        eventually(lambda: count_others(IN_TASK), why="it does not run again")
        terminate_all_others()
        eventually(lambda: Attempt.objects.filter(outcome="LOST").count() == number, why="it was not cut off")  # noqa: B023
    Effect.objects.create(name="go on")
    row = eventually(lambda: Task.objects.filter(status__in=("SUCCESSFUL", "FAILED")).first())
    assert (row.status, row.retries, row.rescues) == ("SUCCESSFUL", 0, 0)
    assert Effect.objects.filter(name="atomic").count() == 1


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


def test_outcomes_are_kept_until_they_can_be_written(worker, eventually):
    """The session of the settler ends while a task runs. The outcome is written in the next session."""
    running = worker(threads=1)
    task = tasks.note_and_sleep.enqueue("kept", 0.5)
    eventually(lambda: Effect.objects.exists())
    terminate_all_others()
    eventually(lambda: Task.objects.filter(pk=task.id, status="SUCCESSFUL").exists())
    assert Task.objects.get().attempts == 1
    eventually(lambda: not running.in_flight.claims)
