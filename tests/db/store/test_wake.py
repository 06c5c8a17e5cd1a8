"""Workers that sleep are called while something is ready, and only then."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock.models import Task
from django_pglock.store.wake import OTHERS_CHANNEL, wake_others
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def heard():
    raw = connection.connection
    raw.execute("SELECT")
    return [(note.channel, note.payload) for note in raw.notifies(timeout=0.2, stop_after=9)]


def test_others_are_called_for_queues_in_which_something_is_ready():
    with connection.cursor() as cursor:
        cursor.execute(f"LISTEN {OTHERS_CHANNEL}")
    tasks.nothing.enqueue()
    tasks.nothing.using(queue_name="mail").enqueue()
    assert wake_others("default", ["default", "empty"])
    assert heard() == [(OTHERS_CHANNEL, "default")]
    Task.objects.all().delete()
    assert not wake_others("default", ["default", "mail"])
    assert heard() == []


def test_others_are_called_for_tasks_that_take_turns():
    tasks.nothing.enqueue()
    Task.objects.update(fair_key="customer 1")
    assert wake_others("default", ["default"])
