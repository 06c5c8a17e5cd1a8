"""Connections to the database are lost and opened again; the worker continues."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from django.db import connection

from django_pglock.models import Attempt, Task, Worker
from django_pglock.worker.running import attempt
from tests.sample import session_tasks, tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


OTHERS = """FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()
            AND backend_type = 'client backend'"""


def count_others() -> int:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*) {OTHERS}")
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


def test_a_storm_of_cut_connections_is_no_poison_pill(worker, eventually, monkeypatch):
    """There are more cuts than MAX_RESCUES, and the task has one attempt. An outage does not count against a task."""
    monkeypatch.setattr(attempt, "FIRST_PAUSE", 0.02)
    worker(threads=1)
    session_tasks.end_own_session.enqueue(6)
    eventually(lambda: Task.objects.filter(status__in=("SUCCESSFUL", "FAILED")).exists())
    task = Task.objects.get()
    assert (task.status, task.attempts, task.retries, task.rescues) == ("SUCCESSFUL", 7, 0, 0)
    assert Effect.objects.count() == 1
    assert set(Attempt.objects.values_list("outcome", flat=True)) == {"LOST"}


def test_pauses_grow_while_a_task_is_cut_off_again_and_again():
    def pause(number, *, retries=0, rescues=0):
        attempt_ = attempt.Attempt.__new__(attempt.Attempt)
        attempt_.claim = SimpleNamespace(attempt=number, retries=retries, rescues=rescues)
        return attempt_.interruption(ValueError()).delay

    for number, bound in enumerate((0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0), start=1):
        assert bound / 2 <= pause(number) <= bound
    assert pause(3, retries=1, rescues=1) <= 0.25, "those were counted elsewhere"


def test_outcomes_are_kept_until_they_can_be_written(worker, eventually):
    """The session of the settler ends while a task runs. The outcome is written in the next session."""
    running = worker(threads=1)
    task = tasks.note_and_sleep.enqueue("kept", 0.5)
    eventually(lambda: Effect.objects.exists())
    terminate_all_others()
    eventually(lambda: Task.objects.filter(pk=task.id, status="SUCCESSFUL").exists())
    assert Task.objects.get().attempts == 1
    eventually(lambda: not running.in_flight.claims)
