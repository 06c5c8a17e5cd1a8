"""Claims from one queue by a worker that knows a function with ``fair=`` and one without."""

from __future__ import annotations

import time
from uuid import uuid4

from django_pglock.models import Task
from django_pglock.worker.child.claimer import QueueCursor, QueueCursors

PATHS = ["tests.sample.keyed_tasks.serve", "tests.sample.tasks.nothing"]


class Claims(QueueCursor):
    def claim(self, limit, *, has_fair=True):
        return super().claim(limit, has_fair=has_fair)


def claims_of(queue="default", *, clock=time.monotonic):
    return Claims(QueueCursors("default", uuid4(), PATHS, clock=clock), queue)


def tenants(claims):
    rows = dict(Task.objects.values_list("pk", "fair_key"))
    return [rows[claim.id] for claim in claims]
