"""The sessions of a child: the feeder has one, and the settler while there is something to write."""

from __future__ import annotations

import gc

import pytest
from django.db import OperationalError

from django_pglock.models import Task
from django_pglock.worker.child import settler
from tests.sample import running_tasks, session_tasks, tasks
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)

COUNT = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
TERMINATE = """
SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE %s
"""


def terminate(name: str) -> int:
    return int(execute_sql(TERMINATE, [name])[0][0])


def count(name):
    return execute_sql(COUNT, [name])[0][0]


def settlers():
    return count("lockworker settler")


def test_the_settler_has_a_session_only_while_there_is_something_to_write(worker, eventually, monkeypatch):
    monkeypatch.setattr(settler, "IDLE_TIMEOUT", 0.3)
    running = worker()
    assert settlers() == 0
    for number in (1, 2):
        tasks.nothing.enqueue()
        eventually(lambda n=number: Task.objects.filter(status="SUCCESSFUL").count() == n)
        assert settlers() == 1
        # The numbers of tasks are written once a minute, in the same session. They are due now.
        running.settler.history._write_at = 0.0
        eventually(lambda: settlers() == 0, why="the settler keeps its session")
    assert running.settler.reconnects == 0, "no session was lost"


def test_an_outcome_is_kept_while_the_settler_gets_no_session(worker, eventually, monkeypatch):
    """The settler has taken the outcome, and then all connections of the server are in use."""
    running = worker(threads=1)
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists())
    failures, open_ = iter([True] * 3), running.settler.open

    def open_or_fail():
        if next(failures, False):
            raise OperationalError("too many clients already")
        open_()

    monkeypatch.setattr(running.settler, "open", open_or_fail)
    Effect.objects.create(name="go on")
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists(), why="the outcome is lost")
    assert Task.objects.get().attempts == 1
    eventually(lambda: not running.in_flight.claims)


def test_an_outcome_is_kept_while_the_session_of_the_settler_is_ended_again_and_again(worker, eventually):
    running = worker(threads=1)
    for number in range(1, 4):
        tasks.nothing.enqueue()
        eventually(lambda n=number: Task.objects.filter(status="SUCCESSFUL").count() == n)
        eventually(lambda: terminate("lockworker settler") == 1)
    assert {*Task.objects.values_list("attempts", "rescues")} == {(1, 0)}
    assert running.settler.reconnects == 2


def test_sessions_of_threads_that_have_ended_are_closed(worker, finished, eventually):
    """Python would close them when it collects garbage. An idle process does not do that for hours."""
    worker()
    gc.disable()
    try:
        finished(session_tasks.select_in_thread.enqueue("of a thread"))
        eventually(lambda: count("of a thread") == 0)
    finally:
        gc.enable()
