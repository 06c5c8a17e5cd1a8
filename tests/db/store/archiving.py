"""Helpers that move tasks to the archive."""

from __future__ import annotations

from uuid import uuid4

from django.db.models.functions import Now

from django_pglock.models import ArchivedTask, Attempt, Task
from django_pglock.store.archive import archive_window

#: Days since the end of a task that is old enough.
TWO_HOURS = 2 / 24


def walk(days=7.0, batch=1000):
    """Move all tasks that are old enough; return their number."""
    count, after = 0, 0
    while True:
        moved, after = archive_window("default", after, days, batch=batch)
        count += moved
        if not after:
            return count


def moved(*rows):
    """Return which tasks are in the archive, after a check that each is in exactly one of the tables."""
    archived = set(ArchivedTask.objects.values_list("pk", flat=True))
    assert archived.isdisjoint(Task.objects.values_list("pk", flat=True))
    return [row.pk in archived for row in rows]


def fail(row, number, **fields):
    known = {"worker": uuid4(), "worker_name": "w", "started_at": Now(), "finished_at": Now(), "outcome": "FAILED"}
    texts = {"exception_path": "builtins.ValueError", "traceback": f"Traceback {number}", "log": "a\nb"}
    return Attempt.objects.create(task=row, number=number, **{**known, **texts, **fields})
