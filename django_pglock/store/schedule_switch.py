"""Enables and disables schedules."""

from __future__ import annotations

from typing import Any

from django_pglock.store.schedule_rows import read_rows


def enable(schedules: Any) -> int:
    """Enable the disabled ones of these schedules. Returns how many. Ticks that have passed meanwhile are not run."""
    disabled = list(schedules.filter(is_enabled=False).values_list("pk", flat=True))
    return sum(
        schedules.filter(pk=row.path, is_enabled=False, next_at=row.next_at).update(
            is_enabled=True, next_at=row.following
        )
        for row in read_rows(schedules.db, disabled)
    )


def disable(schedules: Any) -> int:
    """Enqueue no tasks of these schedules until they are enabled again. Returns how many were enabled."""
    return int(schedules.filter(is_enabled=True).update(is_enabled=False))
