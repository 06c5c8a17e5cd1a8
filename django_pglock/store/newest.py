"""The newest tasks of some statuses, as a person lists them."""

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
    """Return the newest of these tasks, ``limit`` at most, the newest first.

    - ``statuses``: only tasks in one of these; none: in any.
    - ``days``: only tasks enqueued more than so many days ago.
    - ``is_narrow``: the tasks are those of a queue or of a function, as for ``in_status``.

    One statement for each status, in the order of the index on status and id: for several statuses at once the planner
    would read the tasks of all statuses by the primary key.
    """
    if days is not None:
        # Without the id, the search for old tasks would read all tasks that are newer.
        is_old = {"pk__lt": first_id_since(tasks.db, days * DAY), "enqueued_at__lt": Now() - timedelta(days=days)}
        tasks = tasks.filter(**is_old)
    wanted = sorted(set(statuses))
    parts = [in_status(tasks, status, is_narrow=is_narrow).order_by("-status", "-pk") for status in wanted]
    found = [row for part in parts or [tasks.order_by("-pk")] for row in part[:limit]]
    return sorted(found, key=attrgetter("pk"), reverse=True)[:limit]
