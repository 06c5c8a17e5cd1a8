"""The fields on the page of one task: call, keys and result."""

from __future__ import annotations

import json
from typing import Any

from django.contrib import admin
from django.db.models import OuterRef, Subquery
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.http import urlencode
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.pages import elapsed
from django_pglock.models import Attempt, Task, Worker
from django_pglock.store.lock_keys import holders
from django_pglock.tasks.call_keys import RATED
from django_pglock.tasks.redaction import shown
from django_pglock.why_it_waits import FEW

#: At most this number of characters of a value is shown.
MOST_SHOWN = 10_000


@admin.display(description=_("arguments"))
def shown_args(task: Task) -> str:
    """Return the positional arguments."""
    return _as_json(shown(task, "args"))


@admin.display(description=_("keyword arguments"))
def shown_kwargs(task: Task) -> str:
    """Return the keyword arguments."""
    return _as_json(shown(task, "kwargs"))


@admin.display(description=_("lock key"), empty_value="-")
def shown_lock_key(task: Task) -> str | None:
    """Return the lock key, as a link to the tasks that wait for it, and the tasks that hold it.

    The key limits how many tasks with the same key run at once. A redacted key is no link: the list would not find it.
    """
    key = _text_of(task, "lock_key")
    if key is None or key != task.lock_key:
        return key
    link = format_html('<a href="../../?{}">{}</a>', urlencode({"key": key}), key)
    # A task that has got a token of its rate holds nothing.
    is_over = task.finished_at or key.startswith(RATED)
    held = [] if is_over else holders(Task.objects.db, key, limit=FEW)
    if not held:
        return link
    tasks = format_html_join(", ", '<a href="../../{0}/change/">#{0}</a>', ((each,) for each in held))
    return format_html(gettext("{key}, held by {tasks}"), key=link, tasks=tasks)


@admin.display(description=_("group key"), empty_value="-")
def shown_group_key(task: Task) -> str | None:
    """Return the group key: waiting tasks with the same key run in one call."""
    return _text_of(task, "group_key")


@admin.display(description=_("fair key"), empty_value="-")
def shown_fair_key(task: Task) -> str | None:
    """Return the fair key: tasks with different keys take turns."""
    return _text_of(task, "fair_key")


@admin.display(description=_("unique key"), empty_value="-")
def shown_unique_key(task: Task) -> str | None:
    """Return the unique key: ``unique`` says how long no second task may have the same key."""
    return _text_of(task, "unique_key")


@admin.display(description=_("progress"))
def shown_progress(task: Task) -> str:
    """Return the progress that the function has reported."""
    return _as_json(shown(task, "progress"))


@admin.display(description=_("result"))
def shown_result(task: Task) -> str:
    """Return what the function returned."""
    return _as_json(shown(task, "result"))


@admin.display(description=_("log of the last attempt"))
def shown_log(task: Task) -> str:
    """Return the log records of the last attempt, folded."""
    lines = (task.log or "").splitlines()
    text = ngettext("%(number)d line", "%(number)d lines", len(lines)) % {"number": len(lines)}
    return format_html(
        '<details><summary>{}</summary><pre class="pglock-trace" tabindex="0">{}</pre></details>', text, task.log
    )


@admin.display(description=_("metadata"))
def shown_meta(task: Task) -> str:
    """Return the metadata, such as a trace context."""
    return _as_json(shown(task, "meta"))


@admin.display(description=_("task function"))
def shown_task_path(task: Task) -> str:
    """Return the path of the function, as a link to its tasks."""
    return _list_of("task_path", task.task_path)


@admin.display(description=_("queue"))
def shown_queue(task: Task) -> str:
    """Return the queue, as a link to its tasks."""
    return _list_of("queue", task.queue)


@admin.display(description=_("worker"))
def shown_worker(task: Task) -> str:
    """Return the worker of the last attempt: its name, as a link while its row exists; else its name or its id."""
    # A failed or lost attempt keeps the name. Of a task that has succeeded only the id is left.
    last = Attempt.objects.filter(task=OuterRef("pk"), number=task.attempts_made, worker=task.worker).order_by()
    names = Task.objects.filter(pk=task.pk).values_list(
        Subquery(Worker.objects.filter(pk=task.worker).values("name")), Subquery(last.values("worker_name"))
    )
    name, kept = names.first() or (None, None)
    if name is None:
        return str(kept or task.worker)
    return format_html('<a href="../../../worker/{}/change/">{}</a>', task.worker, name)


def moment(name: str) -> Any:
    """Return the field of a date, which shows it with seconds and with the time since or until then."""

    def shown_moment(task: Task) -> str:
        at, now = getattr(task, name), timezone.now()
        text = timezone.localtime(at) if timezone.is_aware(at) else at
        span = gettext("%(span)s ago") if at <= now else gettext("in %(span)s")
        return f"{text:%Y-%m-%d %H:%M:%S} ({span % {'span': elapsed(*sorted((at, now)))}})"

    shown_moment.__name__ = f"shown_{name}"
    field: Any = Task._meta.get_field(name)
    return admin.display(description=field.verbose_name)(shown_moment)


def _list_of(field: str, value: str) -> str:
    # Relative to the page of the task, so that it leads to the same admin site, whatever its name.
    return format_html('<a href="../../?{}">{}</a>', urlencode({field: value}), value)


def _text_of(task: Task, field: str) -> str | None:
    value = shown(task, field)
    return None if value is None else str(value)


def _as_json(value: Any) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return format_html(
        '<pre class="pglock-json" tabindex="0">{}</pre>', text[:MOST_SHOWN] + ("…" if len(text) > MOST_SHOWN else "")
    )
