"""Claims whose answer was lost on the way."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db.models.functions import Now

from django_pglock.models import Task, Worker
from django_pglock.store.give_back import give_back
from django_pglock.store.liveness import beat
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


#: The number that a worker of these tests has drawn.
NUMBER = 4711


def register(worker, *, silent_for=0.0, lock_key=NUMBER):
    beat("default", worker, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False, lock_key=lock_key)
    Worker.objects.filter(pk=worker).update(heartbeat_at=Now() - timedelta(seconds=silent_for))


def test_what_a_worker_owns_without_knowing_is_given_back(claim):
    """The answer to a claim was lost on the way: the heartbeat must not keep such a task alive for ever."""
    worker = uuid4()
    register(worker)
    for _ in range(3):
        tasks.nothing.enqueue()
    known, *unknown = claim(3, worker=worker)
    assert give_back("default", worker, [known.id], older_than=60) == 0, "it may be in our hands in a moment"
    assert give_back("default", worker, [known.id], older_than=0) == 2
    assert set(Task.objects.filter(status="READY").values_list("pk", flat=True)) == {each.id for each in unknown}
