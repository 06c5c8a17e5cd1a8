"""The output of ``locktasks schedules``."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _

from django_pglock.management.tables import aligned, printable
from django_pglock.models import Schedule
from django_pglock.store.schedules import set_last_status

_SHOWN = ("task_path", "expression", "timezone", "is_enabled", "next_at", "last_at", "last_task", "last_status")


def listed(rows: Any) -> list[dict[str, Any]]:
    """Return the schedules of the database of these tasks, by their next tick, each with the status of its last task.

    The status is None if no tick has come yet, and if the task has been deleted.
    """
    found = list(Schedule.objects.using(rows.db).order_by("next_at", "task_path"))
    set_last_status(rows.db, found)
    return [{name: getattr(each, name) for name in _SHOWN} for each in found]


def as_table(found: list[dict[str, Any]]) -> str:
    """Return the schedules as a table."""
    if not found:
        return _("There is no schedule. A worker writes the schedules of the functions that it knows.")
    titles = (_("TASK"), _("WHEN"), _("NEXT TICK"), _("LAST TICK"), _("LAST TASK"), _("LAST STATUS"))
    return "\n".join(aligned(titles, [_as_line(each) for each in found]))


def _as_line(schedule: dict[str, Any]) -> tuple[str, ...]:
    when = " ".join(filter(None, (schedule["expression"], schedule["timezone"])))
    return (
        printable(schedule["task_path"]),
        printable(when),
        _moment(schedule["next_at"]) if schedule["is_enabled"] else _("disabled"),
        _moment(schedule["last_at"]),
        str(schedule["last_task"] or "-"),
        schedule["last_status"] or "-",
    )


def _moment(at: Any) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S%z}" if at else "-"
