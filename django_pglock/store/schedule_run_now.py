"""Enqueues the functions of schedules at once, in addition to their ticks."""

from __future__ import annotations

from typing import Any

from django_pglock.store.schedule_rows import enqueue_scheduled, known


def run_now(schedules: Any) -> list[int]:
    """Enqueue each function of these schedules that this process knows once, whatever its dates are.

    The schedules are not changed. Returns the ids of the tasks. A task that ``unique=`` has refused is missing.
    """
    tasks = known(schedules.db)
    chosen = schedules.filter(pk__in=tasks).order_by("pk").values_list("pk", flat=True)
    enqueued = [enqueue_scheduled(schedules.db, tasks[path], {}) for path in chosen]
    return [id_ for id_ in enqueued if id_ is not None]
