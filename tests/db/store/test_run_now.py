"""Scheduled tasks that a person runs now; and what follows a change, whatever the verb is."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now

from django_pglock.models import Task
from django_pglock.store import operate
from django_pglock.store.count import queue_counts
from tests.db.store.test_prune import make
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_what_follows_a_change_follows_for_the_tasks_that_it_concerns(monkeypatch):
    """The task of a key that still runs, whose cancel is only requested, keeps its key."""
    woken, admitted, released = [], [], []
    monkeypatch.setattr(operate, "wake", lambda using, queues: woken.extend(queues))
    monkeypatch.setattr(operate, "admit_on_commit", lambda using, keys: admitted.extend(keys))
    monkeypatch.setattr(operate, "release_on_commit", lambda using, ids: released.extend(ids))
    make("SCHEDULED", queue="q")
    make("SCHEDULED", queue="r", lock_key="key 0")
    assert Task.objects.all().run_now() == 2
    assert (woken, set(admitted)) == (["q"], {None, "key 0"})
    Task.objects.all().delete()
    make("RUNNING", lock_key="key 1")
    waits = make("BLOCKED", lock_key="key 2")
    admitted.clear()
    assert Task.objects.all().cancel() == 2
    assert (woken, admitted, released) == (["q"], ["key 2"], [waits.pk])


def test_run_now_makes_the_time_since_ready_begin_anew():
    tasks.nothing.using(run_after=timedelta(days=1)).enqueue()
    Task.objects.update(enqueued_at=Now() - timedelta(days=1))
    assert Task.objects.all().run_now() == 1
    [counted] = queue_counts("default")
    assert counted.oldest_ready is not None
    assert counted.oldest_ready < 3600
