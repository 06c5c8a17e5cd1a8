"""Claims from one queue by a worker that knows a function with ``fair=`` and one without."""

from __future__ import annotations

import time
from uuid import uuid4

from django_pglock.models import Task
from django_pglock.worker.child.claimer import QueueCursors

PATHS = ["tests.sample.keyed_tasks.serve", "tests.sample.tasks.nothing"]


def claims_of(queue="default", *, is_fair=True, clock=time.monotonic):
    return QueueCursors("default", uuid4(), PATHS, is_fair, clock=clock).of(queue)


def tenants(claims):
    rows = dict(Task.objects.values_list("pk", "fair_key"))
    return [rows[claim.id] for claim in claims]
