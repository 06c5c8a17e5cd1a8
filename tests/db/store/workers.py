"""Rows of workers, and of the lock that the parent of each holds."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

from django.db.models.functions import Now

from django_pglock.models import Worker
from django_pglock.store.liveness import BEAT, Beat, HeartbeatReply, beat_values
from django_pglock.store.statements import run

#: The number that a parent of these tests has drawn.
NUMBER = 4711
VALUES = {"name": "w", "hostname": "h", "pid": 1, "queues": [], "threads": 1, "is_stopping": False}


def beat(using, worker, *, parent=None, **values):
    """Write the heartbeat of a parent with one worker; the first one registers it. Return the answer."""
    given = Beat(worker, parent or worker, **values)
    rows = run(using, BEAT, *beat_values([given])) or run(using, BEAT, *beat_values([given._replace(task_paths=[])]))
    return HeartbeatReply(*rows[0][1:])


def register(worker, *, silent_for=0.0, lock_key=NUMBER, **values):
    beat("default", worker, **{**VALUES, **values}, lock_key=lock_key)
    Worker.objects.filter(pk=worker).update(heartbeat_at=Now() - timedelta(seconds=silent_for))


def beat_for(parent, *workers, task_paths=(), **values):
    """Write the heartbeats of all workers of a parent. Return the answers."""
    beats = [Beat(each, parent, **{**VALUES, **values}, task_paths=task_paths) for each in workers]
    return {worker: HeartbeatReply(*answer) for worker, *answer in run("default", BEAT, *beat_values(beats))}


def add_sleeping_worker(**values):
    """Make the row of a worker that sleeps, with a parent of its own."""
    row = {"id": uuid4(), "parent": uuid4(), "is_sleeping": True}
    return Worker.objects.create(**{**VALUES, **row, **values})
