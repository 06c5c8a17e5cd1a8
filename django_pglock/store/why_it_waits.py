"""Why a task waits, as a sentence: for the admin, for ``locktasks show``, and for the message of a timeout."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.utils.timezone import is_aware, localtime
from django.utils.translation import gettext, override
from django.utils.translation import gettext_lazy as _

from django_pglock.conf import get_settings
from django_pglock.store.admit import holders
from django_pglock.store.liveness import is_recent
from django_pglock.store.statements import run
from django_pglock.tasks.call_keys import GROUPED, RATED
from django_pglock.tasks.queues import is_served
from django_pglock.tasks.redaction import shown
from django_pglock.tasks.retry import MAX_DELAY
from django_pglock.tasks.states import TaskStatus
from django_pglock.tasks.step_records import Kind

#: At most this number of the tasks for which a task waits is named.
FEW = 5

# The task, whether its queue is paused, the number of living workers, and the queues of those that know its function.
WHY_UNFINISHED = f"""
SELECT task.status, task.queue, task.run_after, queue.paused_at IS NOT NULL, alive.workers, alive.served
FROM {{task}} AS task LEFT JOIN {{queue}} AS queue ON queue.name = task.queue CROSS JOIN LATERAL (
    SELECT count(*) AS workers,
           jsonb_agg(worker.queues) FILTER (WHERE worker.task_paths @> to_jsonb(task.task_path)) AS served
    FROM {{worker}} AS worker WHERE {is_recent("worker.heartbeat_at")}) AS alive
WHERE task.id = %s
"""


# The last step of a task, if it has suspended the last attempt. A task that was claimed since then waits for its retry.
OPEN_STEP = """
SELECT kind, event FROM (
    SELECT step.kind, step.event, step.attempt, step.finished_at FROM {step} AS step WHERE step.task_id = %s
    ORDER BY step.number DESC LIMIT 1) AS last
WHERE finished_at IS NULL AND attempt = (SELECT task.attempts FROM {task} AS task WHERE task.id = %s)
"""

# The number of the children for which a task waits.
GATHERED = """
SELECT jsonb_array_length(step.result -> 'children') FROM {step} AS step
WHERE step.task_id = %s AND step.kind = 'CHILDREN' AND step.finished_at IS NULL
"""


def why_it_waits(task: Any, using: str) -> str:
    """Return the reason why a task waits, apart from the order of the queue; an empty string if there is none."""
    if task.status == TaskStatus.READY:
        return next((reason for *_others, reason in _found(using, task.pk)), "")
    if task.status == TaskStatus.SCHEDULED:
        return _in_a_step(task, using)
    if task.status != TaskStatus.BLOCKED:
        return ""
    if task.waits_for:
        return _at_others(task, using)
    return _at_its_key(task, using)


def why_unfinished(using: str, task_id: int) -> str:
    """Return the status of a task and why no worker runs it, in English; an empty string if there is no such task."""
    with override(None):
        found = _found(using, task_id)
    for status, queue, due, reason in found:
        when = f" and due at {due.isoformat(' ', 'seconds')}" if status == TaskStatus.SCHEDULED else ""
        return f"it is {status} in the queue {queue!r}{when}" + (f". {reason}".rstrip(".") if reason else "")
    return ""


def _found(using: str, task_id: int) -> list[tuple[str, str, datetime, str]]:
    """Return status, queue and date of a task, and why no worker runs it; nothing if there is no such task."""
    rows = run(using, WHY_UNFINISHED, get_settings().HEARTBEAT_LIMIT, task_id)
    return [
        (status, queue, due, "" if status == TaskStatus.RUNNING else _obstacle(queue, *about))
        for status, queue, due, *about in rows
    ]


def _obstacle(queue: str, is_paused: bool, workers: int, served: str | None) -> str:
    """Return why no worker can run the task, and what helps; an empty string if one can."""
    if not workers:
        text = _("No worker is running. Start one: python manage.py runlockworker")
    elif is_paused:
        text = _("No worker runs this task, because the queue %(queue)s is paused. Resume the queue.")
    elif served is None:
        text = _("No worker knows this task. Do the workers import its module, and do they run the new version?")
    elif not any(is_served(queue, asked) for asked in json.loads(served)):
        text = _("No worker that knows this task serves the queue %(queue)s. Start a worker that serves this queue.")
    else:
        return ""
    return str(text) % {"queue": queue}


def _in_a_step(task: Any, using: str) -> str:
    """Return for what a function waits in one of its steps; an empty string if it does not."""
    for kind, event in run(using, OPEN_STEP, task.pk, task.pk):
        until = f"{localtime(task.run_after) if is_aware(task.run_after) else task.run_after:%Y-%m-%d %H:%M:%S}"
        if kind == Kind.CHANGED:
            text = gettext("This task waits for a worker with the code of its steps.")
        elif kind != Kind.EVENT:
            text = gettext("This task sleeps until %(until)s.")
        elif task.run_after - task.last_attempted_at < timedelta(seconds=MAX_DELAY / 2):
            text = gettext("This task waits for the event %(event)s until %(until)s.")
        else:
            text = gettext("This task waits for the event %(event)s, without a timeout.")
        return text % {"event": event, "until": until}
    return ""


def _at_others(task: Any, using: str) -> str:
    """Return for which of its children, or of the tasks of ``after=`` and ``after_ended=``, a task waits."""
    left = task.awaiting.using(using).exclude(has_ended=True).order_by("pk").values_list("awaited", flat=True)[:FEW]
    asked = sum(count for (count,) in run(using, GATHERED, task.pk)) or sum(
        len(ids) for name in ("after", "after_ended") if isinstance(ids := task.meta.get(name), list)
    )
    tasks = _numbers(left)
    if asked <= FEW:
        return gettext("This task waits for %(tasks)s to finish.") % {"tasks": tasks}
    text = gettext("This task waits for %(count)s of %(asked)s tasks to finish: %(tasks)s")
    more = " …" if task.waits_for > FEW else ""
    return text % {"count": f"{task.waits_for:,}", "asked": f"{asked:,}", "tasks": tasks + more}


def _at_its_key(task: Any, using: str) -> str:
    """Return for what a task waits at its key. The keys of ``rate`` and ``group`` are lock keys with a prefix."""
    key, prefix = str(shown(task, "lock_key")), ""
    ids = [] if key.startswith(RATED) else holders(using, str(task.lock_key), limit=FEW)
    if key.startswith(RATED):
        prefix, text = RATED, _("This task waits for a token of its rate. The key of the rate is %(key)s.")
    elif key.startswith(GROUPED):
        prefix = f"{GROUPED}{task.task_path} "
        text = _("This task waits for a call of its group %(key)s. Before it, or in the same call: %(tasks)s.")
    elif "rate" in task.meta and not ids:
        text = _("This task waits for a token of its rate. The key of the rate is its lock key %(key)s.")
    else:
        text = _("This task waits for its lock key %(key)s, which is held by %(tasks)s.")
    tasks = _numbers(ids) or gettext("no task at the moment")
    return str(text) % {"key": key.removeprefix(prefix), "tasks": tasks}


def _numbers(ids: Iterable[int]) -> str:
    return ", ".join(f"#{each}" for each in ids)
