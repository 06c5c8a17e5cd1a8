"""Returns the newest tasks of some statuses, for lists that people read."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from operator import attrgetter
from typing import Any

from django.db.models.functions import Now

from django_pglock.store.count import in_status
from django_pglock.store.prune import DAY, first_id_since


def newest(
    tasks: Any, limit: int, *, statuses: Iterable[str] = (), days: float | None = None, is_narrow: bool = False
) -> list[Any]:
    """Return up to ``limit`` of these tasks, the newest first.

    - ``statuses``: only tasks with one of these statuses; none: with any.
    - ``days``: only tasks that were enqueued more than this number of days ago.
    - ``is_narrow``: the tasks are those of one queue or of one function, as for ``in_status``.

    Sends one statement for each status, in the order of the index on status and id. For several statuses in one
    statement, the planner would read the tasks of all statuses by the primary key.
    """
    if days is not None:
        # Without the id, the search for old tasks would read all tasks that are newer.
        is_old = {"pk__lt": first_id_since(tasks.db, days * DAY), "enqueued_at__lt": Now() - timedelta(days=days)}
        tasks = tasks.filter(**is_old)
    wanted = sorted(set(statuses))
    parts = [in_status(tasks, status, is_narrow=is_narrow).order_by("-status", "-pk") for status in wanted]
    found = [row for part in parts or [tasks.order_by("-pk")] for row in part[:limit]]
    return sorted(found, key=attrgetter("pk"), reverse=True)[:limit]
