"""Sleeping workers are woken if and only if tasks are ready."""

from __future__ import annotations

from types import SimpleNamespace
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Task
from django_pglock.store import wake as wake_module
from django_pglock.store.liveness import beat
from django_pglock.store.wake import (
    OTHERS_CHANNEL,
    READY_CHANNEL,
    SCHEDULED_CHANNEL,
    wake,
    wake_except,
    wake_others,
    write_sleep_flag,
)
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def notifications():
    raw = connection.connection
    raw.execute("SELECT")
    return [(note.channel, note.payload) for note in raw.notifies(timeout=0.2, stop_after=9)]


def test_wake_others_notifies_only_queues_with_ready_tasks():
    with connection.cursor() as cursor:
        cursor.execute(f"LISTEN {OTHERS_CHANNEL}")
    tasks.nothing.enqueue()
    tasks.nothing.using(queue_name="mail").enqueue()
    assert wake_others("default", ["default", "empty"])
    assert notifications() == [(OTHERS_CHANNEL, "default")]
    Task.objects.all().delete()
    assert not wake_others("default", ["default", "mail"])
    assert notifications() == []


def test_wake_others_notifies_queues_with_fair_tasks():
    tasks.nothing.enqueue()
    Task.objects.update(fair_key="customer 1")
    assert wake_others("default", ["default"])
    assert not wake_others("default", ["mail"])
    Task.objects.update(status="BLOCKED", lock_key="a")
    assert not wake_others("default", ["default"])


@pytest.fixture
def clock(monkeypatch):
    """The time of this process, as a list with one number."""
    now = [0.0]
    monkeypatch.setattr(wake_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def add_sleeping_worker():
    sleeper = uuid4()
    beat("default", sleeper, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
    write_sleep_flag("default", sleeper, is_sleeping=True)
    return sleeper


def listen():
    with connection.cursor() as cursor:
        cursor.execute(f"LISTEN {READY_CHANNEL}; LISTEN {SCHEDULED_CHANNEL}")


def test_sleeping_workers_are_woken_after_the_commit_and_once_for_each_queue():
    add_sleeping_worker()
    listen()
    with transaction.atomic():
        wake("default", ["mail", "default", "mail"])
        wake("default", ["mail"])
        wake("default", ["later"], SCHEDULED_CHANNEL)
        assert notifications() == []
    assert sorted(notifications()) == [
        (READY_CHANNEL, "default"),
        (READY_CHANNEL, "mail"),
        (SCHEDULED_CHANNEL, "later"),
    ]
    wake("default", ["other"])
    assert notifications() == [(READY_CHANNEL, "other")], "those before are not woken again"


def test_the_session_keeps_its_synchronous_commit():
    add_sleeping_worker()
    tasks.nothing.enqueue()
    with connection.cursor() as cursor:
        cursor.execute("SET synchronous_commit = on")
        wake("default", ["default"])
        assert wake_others("default", ["default"])
        cursor.execute("SHOW synchronous_commit")
        assert cursor.fetchone() == ("on",)


def count_statements(queue="default"):
    with CaptureQueriesContext(connection) as queries:
        wake("default", [queue])
    return len(queries)


def test_a_worker_that_falls_asleep_before_the_commit_is_woken(clock):
    listen()
    assert count_statements() == 1
    with transaction.atomic():
        wake("default", ["mail"])
        add_sleeping_worker()
        clock[0] = 1.0
    assert notifications() == [(READY_CHANNEL, "mail")]


def test_a_worker_that_wakes_itself_notifies_only_other_sleeping_workers(clock):
    me = add_sleeping_worker()
    listen()
    wake_except("default", ["default"], me)
    assert notifications() == [], "only this worker sleeps"
    clock[0] = 0.05
    add_sleeping_worker()
    wake_except("default", ["mail", "default", "mail"], me)
    assert notifications() == [(READY_CHANNEL, "default"), (READY_CHANNEL, "mail")]
    wake_except("default", [], me)
    assert notifications() == []


def test_that_no_other_worker_sleeps_is_cached_apart_from_that_no_worker_sleeps(clock):
    """Tasks that a task enqueues in the process of a sleeping worker must wake this worker."""
    me = add_sleeping_worker()
    listen()
    wake_except("default", ["default"], me)
    with CaptureQueriesContext(connection) as queries:
        wake_except("default", ["default"], me)
    assert len(queries) == 0, "that no other worker sleeps is known"
    wake("default", ["default"])
    assert notifications() == [(READY_CHANNEL, "default")]
