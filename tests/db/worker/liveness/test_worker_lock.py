"""The lock of a worker: taken once for each session, under another number if that is taken, and not behind a pooler."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock.keys.reserved import WORKER
from django_pglock.models import AdvisoryLock
from django_pglock.models import Worker as WorkerRow
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.worker import Worker
from django_pglock.worker.liveness.heartbeat import WorkerLock
from tests.db.locks.sessions import advisory_rows

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_worker_whose_lock_number_is_taken_draws_another_and_logs_it(eventually):
    """Numbers have 31 bits, so two workers may draw the same one. Or a half-open session still holds the lock."""
    heartbeat = Worker().heartbeat
    taken = heartbeat.lock.number
    session = dedicated_connection("default")
    try:
        with session.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s, %s)", (WORKER, taken))
        heartbeat.start()
        row = eventually(lambda: WorkerRow.objects.first())
        assert row.lock_key == heartbeat.lock.number != taken
        assert AdvisoryLock.objects.filter(name=f"worker {row.name}").count() == 1
    finally:
        heartbeat.stop()
        heartbeat.wait(60)
        session.close()


@pytest.fixture
def lock():
    made = WorkerLock("default")
    yield made
    made.release()


def test_each_session_takes_the_lock_again_under_the_same_number(lock, eventually):
    number = lock.number
    assert (lock.is_held, lock.held_number) == (False, None)
    lock.hold()
    assert (lock.is_held, lock.held_number, advisory_rows()) == (True, number, 1)
    connection.close()
    lock.note_session()
    eventually(lambda: advisory_rows() == 0, why="the server has not ended the session")
    assert (lock.is_held, lock.held_number) == (False, None)
    lock.hold()
    assert (lock.held_number, advisory_rows()) == (number, 1)


def test_a_released_lock_is_free_and_is_not_released_twice(lock, django_assert_num_queries):
    lock.hold()
    lock.release()
    assert (lock.held_number, advisory_rows()) == (None, 0)
    with django_assert_num_queries(0):
        lock.release()
    lock.hold()
    assert advisory_rows() == 1


def test_behind_a_pooler_no_lock_is_taken(pooled, lock):
    lock.hold()
    assert (lock.is_held, lock.held_number, advisory_rows()) == (False, None, 0)
