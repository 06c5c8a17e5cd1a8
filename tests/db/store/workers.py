"""Rows of workers, and of the lock that each holds."""

from __future__ import annotations

from datetime import timedelta

from django.db.models.functions import Now

from django_pglock.models import Worker
from django_pglock.store.liveness import beat

#: The number that a worker of these tests has drawn.
NUMBER = 4711


def register(worker, *, silent_for=0.0, lock_key=NUMBER):
    beat("default", worker, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False, lock_key=lock_key)
    Worker.objects.filter(pk=worker).update(heartbeat_at=Now() - timedelta(seconds=silent_for))
