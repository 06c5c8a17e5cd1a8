"""The page of one task and those below it: its state, its fields, its failed and lost attempts, its stack."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.db.models import Count, F, Func, TextField
from django.db.models.functions import Right
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import timezone
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.pages import SECONDS, capped, elapsed, record
from django_pglock.error_reading import message_in, place_in
from django_pglock.models import Attempt, Step, Task, Waiter, Worker
from django_pglock.store.operate import run_again_from
from django_pglock.store.requests_to_worker import request_stack, wait_for_stack
from django_pglock.store.schedules import SCHEDULE_NAME
from django_pglock.tasks.redaction import is_redacted, shown, shown_step
from django_pglock.tasks.states import WAITING, TaskStatus
from django_pglock.tasks.step_records import OF_OTHER_CODE, Kind

#: At most this number of characters of a value is shown.
MOST_SHOWN = 10_000
#: Characters of a traceback that are read, from its end: for the page, and for the message in a list.
MOST_READ, FEW_READ = 20_000, 2_000
#: Tasks for which this one waits and whose states are counted: the probes of an index take some milliseconds.
MOST_PARTS = 10_000
#: Tasks before and after this one that are shown, and attempts.
FEW, SHOWN_ATTEMPTS = 10, 50
#: Characters of the result of a step.
LONGEST_RESULT = 200
FIRST_LINE = f"""CASE WHEN pg_column_size(%(expressions)s) > 20000 THEN '…'
    WHEN length(%(expressions)s::text) > {LONGEST_RESULT} THEN left(%(expressions)s::text, {LONGEST_RESULT}) || '…'
    WHEN %(expressions)s <> 'null' THEN %(expressions)s::text ELSE '' END"""
#: Seconds for which the page of a stack waits for the answer of the worker. Most answers take milliseconds.
STACK_TIMEOUT = 2.0

# The state, the last failure, and the tasks before and after this one

_STATES = {
    "SUCCESSFUL": _("Succeeded %(ago)s ago, at attempt %(made)d of %(most)d."),
    "FAILED": _("Failed %(ago)s ago, at attempt %(made)d of %(most)d."),
    "CANCELLED": _("Was cancelled %(ago)s ago."),
    "RUNNING": _("Has been running for %(ago)s: attempt %(made)d of %(most)d."),
    "LATER": _("Will be ready in %(ago)s. Attempts so far: %(made)d of %(most)d."),
    "READY": _("Has been ready for %(ago)s. Attempts so far: %(made)d of %(most)d."),
    "WAITING": _("Has been waiting for %(ago)s. Attempts so far: %(made)d of %(most)d."),
}


def sentence(task: Task) -> str:
    """Return the state of the task in one sentence."""
    now = timezone.now()
    is_running = task.status == TaskStatus.RUNNING
    since = (
        task.finished_at
        or (is_running and task.last_attempted_at)
        or max(each for each in (task.enqueued_at, not is_running and task.run_after) if each)
    )
    is_later = task.status == TaskStatus.SCHEDULED and since > now
    # As in the log: each rescue, and each retry by a person, adds to the largest number.
    made = task.attempts_made
    most = made + task.max_retries - task.retries + (not (made and (task.finished_at or is_running)))
    values = {"ago": elapsed(*sorted((since, now))), "made": made, "most": most}
    text = str(_STATES["LATER" if is_later else task.status if task.status in _STATES else "WAITING"] % values)
    if task.status == TaskStatus.SUCCESSFUL and task.cancel_requested_at:
        return " ".join((text, gettext("A cancel was requested, but the function did not stop.")))
    return text


def last_failure(task: Task) -> dict[str, Any] | None:
    """Return the last failed or lost attempt; None if there is none. One statement, which reads the end of one row."""
    rows = task.failures.order_by("-number").annotate(end=Right("traceback", MOST_READ))
    for number, path, trace, cause in rows.values_list("number", "exception_path", "end", "cause")[:1]:
        exception = path.removeprefix("builtins.")
        about = {"exception": exception, "place": place_in(trace), "message": message_in(trace, exception)}
        return {"number": number, "trace": trace, "cause": cause, **about}
    return None


def last_failures(using: str, tasks: Iterable[Task]) -> dict[int, tuple[str, str, int | None]]:
    """Return the exception and the message of the last attempt of those tasks that have failed, by id.

    A task that was cancelled because of a task of its ``after=`` has such a row, too, although it has not begun. The
    third value is the id of that other task.

    One statement; none if no task has failed. Tasks that have succeeded or are running are left out.
    """
    without = (TaskStatus.SUCCESSFUL, TaskStatus.RUNNING)
    asked = [each for each in tasks if each.status not in without]
    last = {each.pk: each.attempts_made for each in asked if each.attempts_made or each.status == TaskStatus.CANCELLED}
    if not last:
        return {}
    # Lists instead of pairs, so that PostgreSQL walks the index once; a task has few other attempts of these numbers.
    rows = Attempt.objects.using(using).filter(task__in=last, number__in={*last.values()}).order_by()
    found = rows.values_list("task_id", "number", "exception_path", "cause", Right("traceback", FEW_READ))
    return {id_: (path, message_in(end, path), cause) for id_, number, path, cause, end in found if last[id_] == number}


def parts_of(task: Task) -> list[int]:
    """Return the ids of the tasks that this one was to run after."""
    meta = task.meta if isinstance(task.meta, dict) else {}
    named = (each for name in ("after", "after_ended") if isinstance(ids := meta.get(name), list) for each in ids)
    return [int(each) for each in named if str(each).isdigit()]


def children_of(steps: Sequence[dict[str, Any]]) -> list[int]:
    """Return the ids of the children of the last gather among these rows of ``latest_steps``. At most one statement."""
    gathers = (row["step"] for row in reversed(steps) if row["step"].kind == Kind.CHILDREN)
    return next((list(gather.result["children"]) for gather in gathers), [])


def batch_of(parts: Sequence[int]) -> dict[str, Any] | None:
    """Return how many of several tasks have ended, how many of these did not succeed, and a few of them.

    Reads at most ``MOST_PARTS`` of them. A task that was pruned has ended.
    """
    if len(parts) < 2:
        return None
    rows = Task.objects.filter(pk__in=parts[:MOST_PARTS])
    counts = dict(rows.order_by().values_list("status").annotate(count=Count("pk")))
    unsuccessful = [status for status in (TaskStatus.FAILED, TaskStatus.CANCELLED) if counts.get(status)]
    failed = rows.filter(status__in=unsuccessful).order_by("pk").values_list("pk", flat=True)[:FEW]
    return {
        "counted": capped(len(parts), MOST_PARTS),
        "ended": min(len(parts), MOST_PARTS) - sum(counts.get(each, 0) for each in (*WAITING, TaskStatus.RUNNING)),
        "unsuccessful": sum(counts[each] for each in unsuccessful),
        "some": list(failed) if unsuccessful else [],
    }


def waiting_for(task: Task) -> list[int]:
    """Return the ids of a few tasks that wait for this one."""
    if task.finished_at:
        return []
    waiting = Waiter.objects.filter(awaited=task.pk, task__isnull=False).order_by("awaited", F("task") + 0)
    return [int(each) for each in waiting.values_list("task_id", flat=True)[:FEW]]


def schedule_of(task: Task) -> str:
    """Return the name of the schedule that has enqueued the task."""
    return str(task.meta.get(SCHEDULE_NAME, task.task_path)) if isinstance(task.meta, dict) else ""


def tick_of(task: Task) -> str:
    """Return the tick of the schedule that has enqueued the task; an empty string if something else has."""
    return str(task.meta.get("schedule", "")) if isinstance(task.meta, dict) else ""


# Fields


def _field(name: str, show: Callable[[Any], Any], description: Any = None, model: Any = Task) -> Any:
    """Return a column as a field of the page."""

    show.__name__ = name
    column: Any = model._meta.get_field(name)
    return admin.display(description=description or column.verbose_name)(show)


def as_text(name: str) -> Any:
    """Return the field of a key, which is hidden if a redacted argument could be read from it."""
    return _field(name, lambda task: shown(task, name))


def as_json(name: str, description: Any = None) -> Any:
    """Return the field of a column with JSON, without redacted values."""

    def show(task: Task) -> str:
        text = json.dumps(shown(task, name), indent=2, ensure_ascii=False)
        cut = text[:MOST_SHOWN] + ("…" if len(text) > MOST_SHOWN else "")
        return format_html('<pre class="pglock-json" tabindex="0">{}</pre>', cut)

    return _field(name, show, description)


def as_link(name: str, parameter: str = "") -> Any:
    """Return the field of a column as a link to the tasks with the same value."""

    def show(task: Task) -> Any:
        value = shown(task, name)
        if value is None or value != getattr(task, name):
            return value  # the list would not find a redacted key
        # Relative to the page of the task, so that it leads to the same admin site, whatever its name.
        return format_html('<a href="../../?{}">{}</a>', urlencode({parameter or name: value}), value)

    return _field(name, show)


def as_moment(name: str, model: Any = Task) -> Any:
    """Return the field of a date, which shows it with seconds and with the time since or until then."""

    def show(row: Any) -> str:
        at, now = getattr(row, name), timezone.now()
        if at is None:
            return "-"
        text = timezone.localtime(at) if timezone.is_aware(at) else at
        span = gettext("%(span)s ago") if at <= now else gettext("in %(span)s")
        return f"{text:{SECONDS}} ({span % {'span': elapsed(*sorted((at, now)))}})"

    return _field(name, show, model=model)


@admin.display(description=_("log of the last attempt"))
def log(task: Task) -> str:
    """Return the log records of the last attempt, folded."""
    lines = (task.log or "").splitlines()
    text = ngettext("%(number)d line", "%(number)d lines", len(lines)) % {"number": len(lines)}
    return format_html(
        '<details><summary>{}</summary><pre class="pglock-trace" tabindex="0">{}</pre></details>', text, task.log
    )


@admin.display(description=_("worker"))
def worker(task: Task) -> str:
    """Return the worker of the last attempt: its name, as a link while its row exists; else its id."""
    name = Worker.objects.filter(pk=task.worker).values_list("name", flat=True).first()
    if name is None:
        return str(task.worker)
    return format_html('<a href="../../../worker/{}/change/">{}</a>', task.worker, name)


def filled(sections: Any, task: Task) -> list[tuple[Any, dict[str, Any]]]:
    """Return the fieldsets of those fields that have something to show."""
    found = ((title, [each for each in fields if _has_value(task, each)]) for title, fields in sections)
    return [(title, {"fields": fields}) for title, fields in found if fields]


def _has_value(task: Task, field: Any) -> bool:
    """Return whether a field has something to show: a function has the name of its column."""
    value = getattr(task, field if isinstance(field, str) else field.__name__, True)
    return value is True or value not in (None, "", 0, [], {})


# Failed and lost attempts. A traceback has up to 60,000 characters, so only the page of one attempt loads it.


def latest_steps(task: Task) -> list[dict[str, Any]]:
    """Return the latest steps of a task, as rows of a table."""
    if not task.attempts:
        return []
    rows = Step.objects.filter(task=task.pk).exclude(name=OF_OTHER_CODE).order_by("-number")
    has_hidden = is_redacted(task)
    if not has_hidden:
        # Each result may have a megabyte. Of a large one, not even its beginning is read.
        rows = rows.defer("result").annotate(line=Func("result", template=FIRST_LINE, output_field=TextField()))
    last: list[Any] = list(rows[:SHOWN_ATTEMPTS])
    return [
        {
            "step": each,
            "took": (each.finished_at - each.started_at).total_seconds() if each.finished_at else None,
            "said": (each.failure or {}).get("message")
            or (in_one_line(shown_step(task, each)) if has_hidden else each.line),
        }
        for each in reversed(last)
    ]


def in_one_line(value: Any) -> str:
    """Return a JSON value as the beginning of its text."""
    text = "" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_RESULT else f"{text[:LONGEST_RESULT]}…"


def latest_attempts(task: Task) -> list[Attempt]:
    """Return the latest attempts, in the order of the index on task and number. A task may fail a thousand times."""
    rows = task.failures.order_by("-number").defer("traceback", "log")
    return list(rows[:SHOWN_ATTEMPTS]) if task.attempts else []


def traceback_page(model_admin: Any, request: HttpRequest, task_id: int, number: int) -> HttpResponse:
    """Show one attempt with its traceback."""
    task = model_admin.seen(request, str(task_id))
    # The default ordering of the model would join the table of tasks.
    attempt = task.failures.filter(number=number).order_by("number").first()
    if attempt is None:
        raise Http404
    title = gettext("Attempt %(number)d") % {"number": number}
    return _answer(model_admin, request, task, "attempt", {"title": title, "attempt": attempt})


def _answer(model_admin: Any, request: HttpRequest, task: Task, name: str, context: dict[str, Any]) -> HttpResponse:
    answer: HttpResponse = model_admin.answer(request, f"task/{name}", {"task": task, "subtitle": str(task), **context})
    return answer


def again_from_view(model_admin: Any, request: HttpRequest, task_id: int) -> HttpResponse:
    """Let a task run again from one of its steps (POST): needs the permission to retry tasks."""
    if not model_admin.has_retry_permission(request):
        raise PermissionDenied
    task, using = model_admin.seen(request, str(task_id)), router.db_for_write(Task)
    with transaction.atomic(using=using):
        names = run_again_from(using, task.pk, step := request.POST.get("step", ""))
        if names:
            record(request, Task, f"again from step {step}: {len(names)} steps", object_id=str(task.pk))
    if names:
        messages.success(request, gettext("The task will run again from this step: %(step)s.") % {"step": step})
    else:
        text = gettext("Nothing was changed: the task runs, or has succeeded, or another task has its unique key.")
        messages.warning(request, text)
    return HttpResponseRedirect(model_admin.address("change", task.pk))


def stack_page(model_admin: Any, request: HttpRequest, task_id: int) -> HttpResponse:
    """Request the stack of a running task (POST), or show the latest answer (GET)."""
    if not model_admin.has_stack_permission(request):
        raise PermissionDenied
    task = model_admin.seen(request, str(task_id))
    using = router.db_for_write(Task)
    if request.method != "POST":
        found = wait_for_stack(using, task.pk, timeout=STACK_TIMEOUT)
        context = {"title": gettext("Stack"), "found": found, "is_running": task.status == "RUNNING"}
        return _answer(model_admin, request, task, "stack", context)
    with transaction.atomic(using=using):
        if request_stack(using, task.pk):
            record(request, Task, "stack: asked for", object_id=str(task.pk))
            return HttpResponseRedirect(model_admin.address("stack", task.pk))
    messages.warning(request, gettext("The task does not run any more."))
    return HttpResponseRedirect(model_admin.address("change", task.pk))
