"""What the commands print about tasks, queues, schedules, failures, attempts and locks.

Each function returns rows as dicts, which ``--json`` prints as they are, and the columns beside it show a part of them
as a table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.utils.translation import gettext_lazy as _

from django_pglock.management.terminal import Columns, duration_text, past, printable
from django_pglock.models import Schedule, Step, Task
from django_pglock.store.attempts import failures_of
from django_pglock.store.count import COUNTED, queue_counts
from django_pglock.store.numbers import OUTCOMES, Total
from django_pglock.store.schedules import with_last_status
from django_pglock.store.why_it_waits import why_it_waits
from django_pglock.tasks.redaction import shown, shown_step
from django_pglock.tasks.step_records import OF_OTHER_CODE

Row = dict[str, Any]

#: The fields of a task that a list shows. Other fields may have megabytes.
LISTED = (
    *("id", "status", "queue", "task_path", "priority", "attempts", "uncounted", "retries"),
    *("rescues", "worker", "lock_key"),
    *("enqueued_at", "run_after", "started_at", "last_attempted_at", "finished_at", "expires_at"),
)
STEP = ("number", "name", "kind", "event", "attempt", "started_at", "finished_at", "failure")
ATTEMPT = ("number", "outcome", "worker", "started_at", "finished_at", "exception_path", "traceback", "log")
#: Fields that have several lines.
TEXTS = ("traceback", "log")
#: Characters of the result of a step in a table.
MOST_SAID = 80
#: The shares of attempts whose times are shown.
SHARES = {"p50": 0.5, "p95": 0.95}


def fields_of(row: Any, names: Iterable[str] = ()) -> Row:
    """Return fields of a row; without names, all columns."""
    return {name: getattr(row, name) for name in names or [field.attname for field in row._meta.concrete_fields]}


# Tasks

TASKS = (
    (_("ID"), itemgetter("id")),
    (_("STATUS"), itemgetter("status")),
    (_("QUEUE"), itemgetter("queue")),
    (_("TASK"), itemgetter("task_path")),
    (_("ATTEMPTS"), itemgetter("attempts")),
    (_("ENQUEUED"), lambda row: past(row["enqueued_at"])),
)


def fields_of_task(task: Task, names: Iterable[str] = LISTED) -> Row:
    """Return fields of a task, redacted; ``attempts`` without the claims that were given back or snoozed."""
    fields = {name: shown(task, name) for name in names if name != "uncounted"}
    return {**fields, "attempts": task.attempts_made, "claims": task.attempts}


def about_task(task: Task, using: str) -> Row:
    """Return all fields of a task, and those of its steps and of its failed and lost attempts."""
    # The stack is printed by a subcommand of its own, and the log has many lines.
    names = [field.attname for field in task._meta.concrete_fields if field.attname not in ("stack", "log")]
    # Beside the status, which is among the first fields.
    first = {"id": task.pk, "status": task.status, "why_it_waits": why_it_waits(task, using) or None}
    attempts = [fields_of(row, ATTEMPT) for row in failures_of(task)]
    rows = Step.objects.using(using).filter(task=task.pk).exclude(name=OF_OTHER_CODE).order_by("number")
    steps = [{**fields_of(row, STEP), "result": shown_step(task, row)} for row in rows]
    return {**first, **fields_of_task(task, names), "log": task.log, "steps": steps, "failures": attempts}


def lines_of_fields(fields: Row) -> Iterator[str]:
    """Yield a line for each field that has a value, and several lines for a text."""
    for name, value in fields.items():
        if name in TEXTS and value:
            yield f"{name}:"
            yield from (f"    {printable(line)}" for line in value.splitlines())
        elif name not in TEXTS and value is not None:
            text = value if isinstance(value, str) else json.dumps(value, cls=DjangoJSONEncoder, ensure_ascii=False)
            yield f"{name + ':':20} {printable(text)}"


def _said(row: Row) -> str:
    if row["failure"]:
        return str(row["failure"].get("message", ""))
    text = "" if row["result"] is None else json.dumps(row["result"], ensure_ascii=False)
    return text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]}…"


STEPS: Columns = (
    (_("NUMBER"), itemgetter("number")),
    (_("STEP"), itemgetter("name")),
    (_("KIND"), itemgetter("kind")),
    (_("ATTEMPT"), itemgetter("attempt")),
    (_("SINCE"), lambda row: past(row["started_at"])),
    (_("TOOK"), lambda row: _time_from(row["started_at"], row["finished_at"]) if row["finished_at"] else ""),
    (_("RESULT OR FAILURE"), _said),
)


# Queues


def _counted(status: str) -> Callable[[Row], str]:
    """Return the column of a status. "10000+" means "at least 10000"."""
    name = status.lower()
    return lambda row: f"{row[name]}{'+' if name in row['at_least'] else ''}"


QUEUES: Columns = (
    (_("QUEUE"), itemgetter("queue")),
    *((status, _counted(status)) for status in COUNTED),
    (_("OLDEST READY"), lambda row: None if row["oldest_ready"] is None else duration_text(row["oldest_ready"])),
    (_("PAUSED"), lambda row: past(row["paused_at"])),
)


def queues_of(using: str) -> list[Row]:
    """Return the counts of each queue."""
    return [
        {
            "queue": queue.queue,
            **{status.lower(): count for status, count in queue.counts.items()},
            "oldest_ready": queue.oldest_ready,
            "paused_at": queue.paused_at,
            "at_least": sorted(status.lower() for status in queue.at_least),
        }
        for queue in queue_counts(using)
    ]


# Schedules

SCHEDULES = (
    (_("NAME"), itemgetter("name")),
    (_("TASK"), lambda row: _("in the code") if row["task_path"] == row["name"] else row["task_path"]),
    (_("WHEN"), lambda row: f"{row['expression']} {row['timezone']}".strip()),
    (_("NEXT TICK"), lambda row: _moment(row["next_at"]) if row["is_enabled"] else _("disabled")),
    (_("LAST TICK"), lambda row: _moment(row["last_at"])),
    (_("LAST TASK"), itemgetter("last_task")),
    (_("LAST STATUS"), itemgetter("last_status")),
)


def schedules_of(using: str) -> list[Row]:
    """Return the schedules by their next tick, each with the status of its last task."""
    found = with_last_status(Schedule.objects.using(using).order_by("next_at", "task_path"))
    return [
        {**fields_of(each), **{name: shown(each, name) for name in ("args", "kwargs")}, "last_status": each.last_status}
        for each in found
    ]


def _moment(at: Any) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S%z}" if at else ""


# Failures

FAILURES = (
    (_("FINGERPRINT"), itemgetter("fingerprint")),
    (_("FAILED"), lambda row: f"{row['count']}{'+' if row['is_capped'] else ''}"),
    (_("LAST"), lambda row: past(row["last_at"])),
    (_("TASK"), itemgetter("task_path")),
    (_("EXCEPTION"), itemgetter("exception_path")),
    (_("PLACE"), itemgetter("place")),
)


# Ended attempts

STATS = (
    (_("QUEUE"), itemgetter("queue")),
    (_("TASK"), itemgetter("task_path")),
    (_("PER MINUTE"), lambda row: f"{row['per_minute']:.1f}"),
    (_("SUCCEEDED"), itemgetter("succeeded")),
    (_("FAILED"), itemgetter("failed")),
    (_("RETRIED"), itemgetter("retried")),
    (_("OTHER"), lambda row: row["cancelled"] + row["snoozed"] + row["lost"]),
    (_("WAIT P50"), lambda row: _seconds(row["wait_p50"])),
    (_("WAIT P95"), lambda row: _seconds(row["wait_p95"])),
    (_("RUN P50"), lambda row: _seconds(row["run_p50"])),
    (_("RUN P95"), lambda row: _seconds(row["run_p95"])),
)


def stats_of(total: Total, minutes: float) -> Row:
    """Return how many attempts ended in a period of this length, and how long they waited and ran, in seconds."""
    counts = total.counts
    return {
        "queue": total.queue,
        "task_path": total.task_path,
        **fields_of(counts, OUTCOMES),
        "per_minute": round(counts.attempts / minutes, 3),
        **{f"wait_{name}": counts.wait_quantile(share) for name, share in SHARES.items()},
        **{f"run_{name}": counts.run_quantile(share) for name, share in SHARES.items()},
    }


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.3f} s"


# Locks

#: Waiting sessions are indented below the holder.
LOCKS = (
    (_("LOCK"), lambda row: f"{'' if row['is_granted'] else '  ↳ '}{row['name'] or '#{key}'.format(**row)}"),
    (_("MODE"), itemgetter("mode")),
    (_("SESSION"), itemgetter("pid")),
    (_("WAITS FOR"), lambda row: ", ".join(map(str, row["blocked_by"]))),
    (_("SINCE"), lambda row: past(row["since"])),
    (_("APPLICATION"), itemgetter("application_name")),
)
LEASES = (
    (_("LEASE"), itemgetter("name")),
    (_("OWNER"), itemgetter("owner")),
    (_("TOKEN"), itemgetter("token")),
    (_("HELD FOR"), lambda row: _time_from(row["acquired_at"], row["server_time"])),
    (_("RENEWED"), lambda row: _time_from(row["renewed_at"], row["server_time"])),
    (_("EXPIRES IN"), lambda row: _time_from(row["server_time"], row["expires_at"])),
)


def _time_from(start: Any, end: Any) -> Any:
    return _("never") if end is None else duration_text((end - start).total_seconds())
