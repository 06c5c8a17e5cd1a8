"""Unique tasks: which tasks have their unique key taken."""

from __future__ import annotations

from django.db.models import Q

from django_pglock.tasks.states import UniqueScope

#: Whether a task keeps others with the same unique key from being enqueued. The index of these keys has the same
#: condition, and PostgreSQL uses it only for a query that says it in the same words.
HAS_UNIQUE_KEY = (
    Q(unique_scope=UniqueScope.WAITING, attempts=0, finished_at__isnull=True)
    | Q(unique_scope=UniqueScope.UNFINISHED, finished_at__isnull=True)
    | Q(unique_scope=UniqueScope.PERIOD)
)
