"""The services of a worker share a few sessions: as many as the load needs, and one service at a time in each."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connection, connections

from django_pglock.models import Task
from django_pglock.worker.service import ConnectedService, SharedSessions
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def sessions():
    shared = SharedSessions("default")
    yield shared
    shared.close()


def opened(sessions):
    session = sessions.take()
    session.ensure_connection()
    return session


def test_a_session_in_a_transaction_is_not_passed_on(sessions):
    session = opened(sessions)
    with session.cursor() as cursor:
        cursor.execute("BEGIN")
    sessions.give_back(session)
    assert session.connection is None
    assert sessions.take() is not session


def test_after_the_end_nothing_stays_open(sessions):
    idle, in_use = opened(sessions), opened(sessions)
    sessions.give_back(idle)
    sessions.close()
    assert idle.connection is None
    sessions.give_back(in_use)
    assert in_use.connection is None


TERMINATE = """
SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE %s
"""


def terminate(name: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute(TERMINATE, [name])
        return int(cursor.fetchone()[0])


def test_an_unused_session_that_has_ended_is_replaced(sessions, in_threads):
    """As after the idle timeout of a load balancer."""

    def look(_):
        part = ConnectedService("default", sessions)
        part.open()
        part.release_session()
        assert terminate("lockworker work") == 1
        connections["default"].close()
        part.open()
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT 1")
        assert part.reconnects == 1
        part.close_at_end()

    in_threads(look, 1)


def test_tasks_that_come_while_the_session_that_listens_is_ended_are_found(worker, eventually, settings):
    """No notification comes for these tasks. Without a poll, the worker would sleep for ten minutes."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 600.0}
    running = worker()
    for number in range(1, 4):
        eventually(lambda: running.sleep.since is not None and not running.fetcher.is_connected)
        # The session before may not have been replaced yet.
        eventually(lambda: terminate("lockworker heartbeat") == 1)
        for _ in range(3):
            tasks.nothing.enqueue()
        eventually(lambda n=number: Task.objects.filter(status="SUCCESSFUL").count() == 3 * n, why="it sleeps")
    assert running.in_flight.answer_lost_at < 0, "no answer to a claim was lost"


def test_an_outcome_is_written_although_all_other_parts_wait_in_their_sessions(worker, eventually):
    """A migration blocks the sessions of the other services. The settler must not wait for these."""
    running = worker(threads=1)
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists())
    taken = [running.sessions.take() for _ in range(3)]
    Effect.objects.create(name="go on")
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists())
    for session in taken:
        session.close()


def test_a_part_that_has_released_has_no_session_of_others(sessions, in_threads):
    """A statement sent now would be executed in the transaction of another service."""

    def look(_):
        part = ConnectedService("default", sessions)
        part.open()
        shared = connections["default"]
        part.release_session()
        assert connections["default"] is not shared
        part.retake_session()
        assert connections["default"] is shared
        part.close_at_end()

    in_threads(look, 1)


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
