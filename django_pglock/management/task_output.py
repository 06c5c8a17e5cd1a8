"""How ``locktasks`` prints tasks, attempts, queues and schedules: fields, lines of tables, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.utils.translation import gettext as _

from django_pglock.management.terminal import ago, aligned, duration_text, printable
from django_pglock.models import Schedule, Task
from django_pglock.store.attempts import failures_of
from django_pglock.store.count import COUNTED, QueueCounts
from django_pglock.store.schedules import set_last_status
from django_pglock.store.why_it_waits import why_it_waits
from django_pglock.tasks.redaction import shown

#: The fields of a task that a list shows. Other fields may have megabytes.
LISTED = (
    *("id", "status", "queue", "task_path", "priority", "attempts", "uncounted", "retries"),
    *("rescues", "worker", "lock_key"),
    *("enqueued_at", "run_after", "started_at", "last_attempted_at", "finished_at", "expires_at"),
)
ATTEMPT = ("number", "outcome", "worker", "started_at", "finished_at", "exception_path", "traceback", "log")
SCHEDULE_FIELDS = (
    "name",
    "task_path",
    "expression",
    "timezone",
    "is_enabled",
    "next_at",
    "last_at",
    "last_task",
    "last_status",
)


def fields_of_attempt(row: Any) -> dict[str, Any]:
    """Return the fields of an attempt that are shown."""
    return {name: getattr(row, name) for name in ATTEMPT}


def fields_of_task(task: Task, names: Iterable[str]) -> dict[str, Any]:
    """Return fields of a task, redacted; ``attempts`` without the claims that were given back or snoozed."""
    fields = {name: shown(task, name) for name in names if name != "uncounted"}
    return {**fields, "attempts": task.attempts_made, "claims": task.attempts}


def about_task(rows: Any, task_id: int) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Return the fields of a task and of its failed and lost attempts; None if there is no such task."""
    task = rows.filter(pk=task_id).first()
    if task is None:
        return None
    # The stack is printed by a subcommand of its own.
    names = [field.attname for field in task._meta.concrete_fields if field.attname != "stack"]
    fields = fields_of_task(task, names)
    # Beside the status, which is among the first fields.
    about = {
        "id": fields.pop("id"),
        "status": fields.pop("status"),
        "why_it_waits": why_it_waits(task, rows.db) or None,
    }
    return about | fields, [fields_of_attempt(row) for row in failures_of(task)]


def queue_as_json(queue: QueueCounts) -> dict[str, Any]:
    """Return the counts of a queue for JSON."""
    return {
        "queue": queue.queue,
        **{status.lower(): count for status, count in queue.counts.items()},
        "oldest_ready": queue.oldest_ready,
        "paused_at": queue.paused_at,
        "at_least": sorted(status.lower() for status in queue.at_least),
    }


def queue_as_line(queue: QueueCounts) -> tuple[str, ...]:
    """Return the counts of a queue as a line of the table; "10000+" means "at least 10000"."""
    counts = (f"{queue.counts[status]}{'+' if status in queue.at_least else ''}" for status in COUNTED)
    oldest = "-" if queue.oldest_ready is None else duration_text(queue.oldest_ready)
    return (printable(queue.queue), *counts, oldest, _("%s ago") % ago(queue.paused_at) if queue.paused_at else "-")


def lines_of_fields(fields: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each field."""
    for name, value in fields.items():
        text = value if isinstance(value, str) else json.dumps(value, cls=DjangoJSONEncoder, ensure_ascii=False)
        yield f"{name + ':':20} {printable(text)}"


def schedules_of(rows: Any) -> list[dict[str, Any]]:
    """Return the schedules of the database of these tasks, by their next tick, each with the status of its last task.

    The status is None if no tick has come yet, and if the task has been deleted.
    """
    found = list(Schedule.objects.using(rows.db).order_by("next_at", "task_path"))
    set_last_status(rows.db, found)
    return [{name: getattr(each, name) for name in SCHEDULE_FIELDS} for each in found]


def schedules_table(found: list[dict[str, Any]]) -> str:
    """Return the schedules as a table."""
    if not found:
        return _("There is no schedule. A worker writes the schedules of the functions that it knows.")
    titles = (_("TASK"), _("WHEN"), _("NEXT TICK"), _("LAST TICK"), _("LAST TASK"), _("LAST STATUS"))
    return "\n".join(aligned(titles, [_schedule_line(each) for each in found]))


def _schedule_line(schedule: dict[str, Any]) -> tuple[str, ...]:
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
