"""Enables and disables schedules."""

from __future__ import annotations

from typing import Any

from django_pglock.store.schedule_rows import read_rows


def enable(schedules: Any) -> int:
    """Enable those of these schedules that are disabled. Returns how many. Ticks that have passed are not run."""
    disabled = list(schedules.filter(is_enabled=False).values_list("pk", flat=True))
    return sum(
        schedules.filter(pk=row.path, is_enabled=False, next_at=row.next_at).update(
            is_enabled=True, next_at=row.following
        )
        for row in read_rows(schedules.db, disabled)
    )


def disable(schedules: Any) -> int:
    """Disable those of these schedules that are enabled. Returns how many. They enqueue no tasks until ``enable``."""
    return int(schedules.filter(is_enabled=True).update(is_enabled=False))
