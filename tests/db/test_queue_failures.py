"""What other queues are known to fail at, where no other test shows that this one does not: docs/failures.md."""

from __future__ import annotations

import itertools
from uuid import uuid4

import pytest
from django.db import connection, transaction

from django_pglock.db import dedicated_connection
from django_pglock.models import Worker
from django_pglock.tasks import wakeup
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def beat(worker, **options):
    """Write a worker's row, as its heartbeat does."""
    same = {"name": "pod-1", "hostname": "pod-1", "pid": 7, "queues": [], "threads": 1, "is_stopping": False}
    return Worker.objects.all().beat(worker, **{**same, **options})


def ask(sql, *values):
    with connection.cursor() as cursor:
        cursor.execute(sql, values or None)
        return cursor.fetchall()


# Waking


@pytest.fixture
def heard():
    """Listen as a worker does; return what was notified, each payload as often as it came."""
    listener = dedicated_connection("default")
    with listener.cursor() as cursor:
        cursor.execute(f"LISTEN {wakeup.READY_CHANNEL}")

    def hear():
        # Notifications come in the order of their commits: before this one, all that there were.
        ask("SELECT pg_notify(%s, 'the end')", wakeup.READY_CHANNEL)
        notes = listener.connection.notifies(timeout=20)
        return list(itertools.takewhile(lambda payload: payload != "the end", (note.payload for note in notes)))

    yield hear
    listener.close()


@pytest.mark.parametrize(("is_sleeping", "expected"), [(False, []), (True, ["default", "mail"])])
def test_nobody_is_notified_unless_somebody_sleeps_and_then_once(heard, is_sleeping, expected):
    """Each NOTIFY takes a lock that serialises the commits of the whole server."""
    worker = uuid4()
    beat(worker)
    Worker.objects.note_sleep(worker, is_sleeping=is_sleeping)
    wakeup._nobody_slept_at.clear()
    with transaction.atomic():
        for number in range(100):
            tasks.nothing.using(queue_name=("default", "mail")[number % 2]).enqueue()
    assert sorted(heard()) == expected


def test_what_was_rolled_back_takes_no_notification_along(heard):
    worker = uuid4()
    beat(worker)
    Worker.objects.note_sleep(worker, is_sleeping=True)
    for is_undone in (True, False):
        with transaction.atomic():
            tasks.nothing.using(queue_name="outer").enqueue()
            with transaction.atomic():
                tasks.nothing.using(queue_name="inner").enqueue()
                transaction.set_rollback(True)
            tasks.nothing.using(queue_name="inner").enqueue()
            transaction.set_rollback(is_undone)
    assert sorted(heard()) == ["inner", "outer"]
